"""As for the models' kernels: on a GPU where there is one (`-m gpu`), else in Triton's interpreter at tiny sizes."""

from tests.models.kernels.conftest import collect_ignore_glob, device  # noqa: F401
