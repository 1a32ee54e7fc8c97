from tests.integration.conftest import bench, zygote  # noqa: F401
