"""Operators: importing this package fills `OPERATORS`, target -> function."""

from onchip.ops import activations as activations
from onchip.ops import attention as attention
from onchip.ops import contractions as contractions
from onchip.ops import conversion as conversion
from onchip.ops import convolution as convolution
from onchip.ops import elementary as elementary
from onchip.ops import indexing as indexing
from onchip.ops import losses as losses
from onchip.ops import normalization as normalization
from onchip.ops import parts as parts
from onchip.ops import pointwise as pointwise
from onchip.ops import reductions as reductions
from onchip.ops import resampling as resampling
from onchip.ops import selection as selection
from onchip.ops import softmax as softmax
from onchip.ops import statistics as statistics
from onchip.ops import views as views
from onchip.ops import windows as windows
from onchip.ops.registry import OPERATORS as OPERATORS
