"""Which driver, libraries and device the report is about."""

import importlib.metadata
import platform
import shutil
import subprocess

import torch

from gpu_report.step import Step

PACKAGES = ("numpy", "pyzmq", "msgpack", "triton", "pytest", "hypothesis")

# Without these no report can be compared with another.
NEEDED = ("numpy", "pyzmq", "msgpack")

# Rows and columns of matrices of ones, whose product is exact.
SIZE = 64


def run(step: Step) -> None:
    """Records versions, and checks that torch computes on the device and supports the other steps."""
    _software(step)
    _device(step)
    _driver(step)
    product = _on_device(step)
    expected = torch.full((SIZE, SIZE), float(SIZE))
    step.check("the device multiplies matrices", torch.equal(product.cpu(), expected), f"on {product.device}")
    step.check("tensors are on the device that was asked for", product.device == step.device, str(product.device))
    step.check("the device has float64", torch.ones(1, dtype=torch.float64, device=step.device).sum().item() == 1.0)


def _on_device(step: Step) -> torch.Tensor:
    ones = torch.ones(SIZE, SIZE, device=step.device)
    return ones @ ones


def _software(step: Step) -> None:
    step.figure("Python", platform.python_version())
    step.figure("system", platform.platform())
    step.figure("torch", torch.__version__)
    step.figure("CUDA of torch", torch.version.cuda or "none")
    step.figure("cuDNN", str(torch.backends.cudnn.version() or "none"))
    step.figure("NCCL", _nccl())
    for package in PACKAGES:
        version = _version(package)
        step.figure(package, version or "none")
        if package in NEEDED:
            step.check(f"{package} is installed", version)
    step.figure("gcc", _output("gcc", "--version").split("\n")[0] or "none")


def _device(step: Step) -> None:
    if step.device.type != "cuda":
        step.figure("device", platform.processor() or platform.machine())
        return
    properties = torch.cuda.get_device_properties(step.device)
    step.figure("device", properties.name)
    step.figure("devices", torch.cuda.device_count())
    step.figure("compute capability", f"{properties.major}.{properties.minor}")
    step.figure("multiprocessors", properties.multi_processor_count)
    step.figure("memory", round(properties.total_memory / 2**30, 1), "GiB")
    step.figure("bfloat16", str(torch.cuda.is_bf16_supported()))


def _driver(step: Step) -> None:
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    step.figure("driver", driver.strip() or "none")
    if text := _output("nvidia-smi"):
        step.note(text)
    elif not step.stand_in:
        step.note("nvidia-smi is not there")


def _nccl() -> str:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "none"
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """Returns the output of a program; empty if it is missing, fails or hangs."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        return subprocess.run([program, *command[1:]], capture_output=True, text=True, check=True, timeout=10).stdout  # noqa: S603 - listed above
    except (OSError, subprocess.SubprocessError):
        return ""
