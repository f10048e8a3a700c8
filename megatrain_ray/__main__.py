"""``python -m megatrain_ray``."""

from megatrain_ray.cli import main

main()
