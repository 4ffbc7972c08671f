"""Pipeline schedules as pure data, a simulator that times them, and an executor that runs them."""
