"""The command `anygpu-farm` whose workers keep every step, and take a while for each: arguments as the command's."""

import sys
from typing import Any

import chaos
from anygpu.farm import cli
from anygpu.farm.driver import Driver

if __name__ == "__main__":
    plain = Driver.start_workers

    def start_workers(driver: Driver, count: int, renderer: Any, needs: dict[str, float]) -> None:
        """As the driver does, with renderers of ``chaos.py``."""
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(chaos)  # the workers cannot import tests
        steady = chaos.Steady(renderer.folder, renderer.models, renderer.state, renderer.device)
        plain(driver, count, steady, needs)

    Driver.start_workers = start_workers
    sys.exit(cli.main())
