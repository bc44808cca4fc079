"""cuDNN's graphs: a convolution and what follows it element by element, as one of its plans."""
