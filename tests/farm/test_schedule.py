"""Who does which job next."""

from anygpu.farm.schedule import Task, TaskSchedule


def tasks(*pairs: tuple[str, float]) -> list[Task]:
    """Tasks of models and sizes, with keys that say both."""
    return [Task(f"{model}{size:g}", model, size) for model, size in pairs]


def scheduled(*pairs: tuple[str, float]) -> TaskSchedule:
    schedule = TaskSchedule()
    schedule.add(tasks(*pairs))
    return schedule


def order(schedule: TaskSchedule, worker: str) -> list[str]:
    """The keys of all jobs that ``worker`` would do if it were alone."""
    return [task.key for task in iter(lambda: schedule.take(worker), None)]


def test_a_worker_keeps_its_model_and_does_the_largest_job_first() -> None:
    schedule = scheduled(("a", 1), ("b", 5), ("a", 3), ("b", 7), ("a", 2))
    assert order(schedule, "w") == ["b7", "b5", "a3", "a2", "a1"]
    assert len(schedule) == 0


def test_two_workers_load_two_models_even_if_one_has_more_work() -> None:
    schedule = scheduled(*[("a", 1.0 + n) for n in range(6)], ("b", 9), ("b", 8))
    first, second = schedule.take("v"), schedule.take("w")
    assert first is not None and second is not None
    assert (first.model, second.model) == ("a", "b")
    assert [task.model for task in (schedule.take("v"), schedule.take("w")) if task] == ["a", "b"]


def test_a_job_whose_worker_died_is_the_next_of_its_model_also_after_others_came_in() -> None:
    schedule = scheduled(("a", 1), ("a", 2), ("a", 3))
    begun = [task for task in (schedule.take("v"), schedule.take("v"), schedule.take("v")) if task][-1]
    schedule.add(tasks(("a", 8), ("a", 9)))
    schedule.put_back(begun)
    schedule.add(tasks(("a", 10)))
    assert order(schedule, "w") == ["a1", "a10", "a9", "a8"]


def test_a_model_that_a_worker_could_not_load_rests_there_alone_and_for_a_time() -> None:
    schedule = scheduled(("a", 9), ("b", 1), ("b", 2))
    schedule.refuse("w", "a", 100.0)
    assert [task and task.key for task in (schedule.take("w", 100.0), schedule.take("w", 110.0))] == ["b2", "b1"]
    assert schedule.take("w", 129.0) is None and schedule.refusals("v", "a") == 0
    found = schedule.take("w", 130.0)
    assert found is not None and found.key == "a9"
    schedule.put_back(found)
    schedule.refuse("w", "a", 130.0)
    assert schedule.take("w", 189.0) is None and schedule.take("v", 131.0) is found
    schedule.accept("w", "a")
    assert schedule.refusals("w", "a") == 0


def test_a_job_that_a_worker_refused_is_for_the_others() -> None:
    schedule = scheduled(("a", 9), ("a", 1))
    first = schedule.take("w")
    assert first is not None
    first.refused["w"] = "too large"
    schedule.put_back(first)
    assert order(schedule, "w") == ["a1"] and order(schedule, "v") == ["a9"]


def test_cancelled_jobs_leave_the_others_in_their_order() -> None:
    schedule = scheduled(("a", 1), ("a", 2), ("b", 3))
    assert [task.key for task in schedule.drop(["a2", "c"])] == ["a2"]
    assert order(schedule, "w") == ["b3", "a1"]


def test_the_simulated_share_counts_jobs_alone_as_work() -> None:
    """One worker without deaths: its jobs, one load, and the driver's time for each job."""
    from farm_runs import Constants, Farm, Simulation

    tasks, own = [Task(str(number), "a", 10.0) for number in range(6)], Constants(driver=0.5, load=20.0)
    run = Simulation(tasks, Farm("", 1, 6), own).run()
    assert (run.ideal, run.wall) == (60.0, 60.0 + 20.0 + 6 * 0.5)
