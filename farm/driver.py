"""The driver, which hands a folder's jobs to workers. All it knows is in the folder: another goes on where it ended."""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..compat.device.facts import value_or
from ..compat.errors import PackError, UnsupportedError, first_line, sentence
from ..pipelines.records.job_folder import JobFolder, each_line
from .cluster import asked_by, autoscales, lacking
from .schedule import Rest, Tally, Task, TaskSchedule, WorkerHandle
from .worker import BROKEN, CANCELLED, DONE, FAILED, LOST, UNABLE, Outcome, Worker, text_of

MOST_DEATHS = 3  # of a job's workers without one further step: then the job is at fault
MOST_RESTS = 3  # of a worker in a row, from one model or from all: then no job waits for it any longer
START_SECONDS = 600.0  # that a worker's process may take to come up, until no job waits for it
LOOK_SECONDS = 0.5  # between looks for cancelled jobs
SHOW_SECONDS = 2.0  # between two writings of what the workers do
REMIND_SECONDS = 60.0  # between two lines about devices that are missing
LACK_SECONDS = 2.0  # that a run waits for machines which are just joining
MOST_PAUSE = 60.0  # seconds after a turn that failed, which grow to this
MOST_PAUSES = 10  # of failed turns in a row, after which `run` ends
ANSWERS = 4  # threads of a worker: one renders, the others answer calls about it
Say = Callable[[str], None]


class Driver:
    """One driver over one folder. ``reached`` grows with a job's saved steps; ``say`` gets each line for the user."""

    def __init__(
        self, ray: Any, folder: JobFolder, task_of: Callable[[str], Task], reached: Callable[[Task], float], say: Say,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self.ray, self.folder, self.task_of, self.reached, self.say = ray, folder, task_of, reached, say
        self.clock, self.sleep = clock, sleep
        # In a container that was started again, host and process are those of the driver whose workers Ray still ends.
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self.watching = False  # the folder, for ever
        self.asked: dict[str, float] = {}  # what a worker, or a whole group, needs of the cluster, by Ray's names
        self.schedule, self.tally = TaskSchedule(), Tally()
        self.workers: list[WorkerHandle] = []
        self._calls: dict[Any, WorkerHandle] = {}  # without an answer yet
        self._failed_turns = 0  # in a row
        self._open: set[str] = set()  # keys of jobs that wait or run
        self._read: dict[Path, tuple[int, ...]] = {}  # size, time and inode of each job file of a watched folder
        self._looked = self._shown = self._reminded = -math.inf  # when it last did, by its clock
        self._began, self._lack = clock(), ""  # what the cluster lacks for any worker to start
        self._steps: dict[str, float] = {}  # how far a job was, as ``reached`` has it, when a worker died at it, by key
        self._notes: dict[str, str] = {}  # why jobs failed, by key, where the folder has not taken it yet
        self._troubles: dict[str, str] = {}  # last error of each action of :meth:`_try`; empty after a success

    def start_workers(self, count: int, renderer: Any, needs: dict[str, Any]) -> None:
        """Ask Ray for ``count`` workers, which start once there is room; ``needs``: options of their actors."""
        actor = self.ray.remote(Worker)
        self.asked = self.asked or asked_by(needs)
        for _ in range(count):
            name = f"{self.name}-{len(self.workers)}"
            made = actor.options(name=name, max_restarts=-1, max_concurrency=ANSWERS, **needs)
            worker = WorkerHandle(name, made.remote(renderer), partial(made.remote, renderer))
            self.workers.append(worker)
            self._wait_for(worker)

    def add(self, lines: Iterable[str], again: bool, where: str = "") -> None:
        """Queue the new jobs of ``lines``, none where ``lines`` raises; failed and cancelled ones only if asked
        ``again``. Lines that are no jobs count as failed (in a watch the first), and are reported after ``where``."""
        done, tasks, wrong, first_error = self.folder.done_keys(), dict[str, Task](), 0, ""
        for number, line in enumerate(lines, 1):
            try:
                task = self.task_of(line)
            except Exception as error:  # of a line that may hold anything
                if not wrong or not self.watching:
                    self.tally.failed[f"{where}line {number}: {line[:60]}"] = text_of(error)
                wrong, first_error = wrong + 1, first_error or f"{line[:60]!r}: {text_of(error)}"
                continue
            if task.key in self._open or task.key in tasks:
                continue
            if task.key in done:
                self.tally.skipped += 1
            elif again or not (task.key in self._notes or self.folder.failure(task.key)):
                tasks[task.key] = task
        if wrong:
            many = "a line is not a job" if wrong == 1 else f"{wrong} lines are not jobs, the first"
            self.say(f"{where}{many}: {first_error}")
        if again:
            self.folder.ask_again(tasks)
        self._open |= tasks.keys()
        self.schedule.add(tasks.values())

    def watch(self) -> NoReturn:
        self.watching = True
        while True:
            self._careful_turn()

    def run(self) -> Tally:
        """Render until no job waits or runs, and return the counts."""
        while self.schedule or any(worker.task or worker.held for worker in self.workers):
            self._careful_turn()
        self._try("the notes of failed jobs", self._write_notes)
        self._try("what the workers do", self._show)
        return self.tally

    def _careful_turn(self) -> None:
        """Take a :meth:`turn`; report errors, with ever longer pauses. Unsupported or repeated, they end a run."""
        try:
            self.turn()
            self._failed_turns = 0
        except Exception as error:  # only its owner ends a farm
            self._failed_turns += 1
            if not self.watching and (isinstance(error, UnsupportedError) or self._failed_turns > MOST_PAUSES):
                raise
            pause = min(LOOK_SECONDS * 2 ** min(self._failed_turns, 9), MOST_PAUSE)
            self.say(f"the farm stumbled ({text_of(error)}) and goes on in {pause:g} s")
            self.sleep(pause)

    def _try(self, what: str, action: Callable[[], None]) -> bool:
        """Run ``action``, which needs the folder; report an OSError once, and return False, to try it again."""
        try:
            action()
            trouble = ""
        except OSError as error:
            trouble = text_of(error)
        if trouble and self._troubles.get(what) != trouble:
            self.say(f"{what}: {trouble}")
        self._troubles[what] = trouble
        return not trouble

    def turn(self) -> None:
        """Give work to free workers, do what is due by now, then wait a moment for answers and act on them."""
        now = self.clock()
        for worker in sorted(self.workers, key=lambda worker: worker.faults):
            if worker.broken and not worker.proving and now >= worker.rest.until:
                self._prove(worker)
            elif worker.state == "idle":
                self._give(worker)
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._try("cancelled jobs", self._cancel)
            self._try("the notes of failed jobs", self._write_notes)
            if self.watching:
                self._try("the jobs", self._read_jobs)
        if now - self._shown >= SHOW_SECONDS:
            self.report_lacking()
            self._give_up_what_nobody_can()
            self._try("what the workers do", self._show)
        if not self._calls:
            self.sleep(LOOK_SECONDS)
            return
        rest = max(0.0, self._looked + LOOK_SECONDS - self.clock())
        ready, _ = self.ray.wait(list(self._calls), num_returns=1, timeout=rest)
        for call in ready:
            self._take(call, self._calls.pop(call))

    def _give(self, worker: WorkerHandle) -> None:
        """Send an idle worker its next job, if any; the model of its suspect rests, unless the job is of that one."""
        now = self.clock()
        task = self.schedule.take(worker.name, now)
        if worker.suspect is not None and (task is None or task.model != worker.suspect.model):
            self._rest_model(worker, worker.suspect)  # no other job of it could be tried
        if task is not None:
            worker.task, worker.began = task, now
            try:
                self._calls[worker.actor.run.remote(task)] = worker
            except Exception as error:  # of Ray's many kinds
                self._break(worker, first_line(error))

    def _wait_for(self, worker: WorkerHandle) -> None:
        """Count ``worker`` as up once its process answers: a call that is sent while Ray restarts it fails at once."""
        worker.up, worker.task, worker.began = False, None, self.clock()
        self._calls[worker.actor.ready.options(max_task_retries=-1).remote()] = worker

    def _take(self, call: Any, worker: WorkerHandle) -> None:
        """Act on a worker's answer: a job's outcome, a proof's text, or who it is; or on the error in its place."""
        try:
            answer = self.ray.get(call)
        except Exception as error:  # Ray's, or of an answer that cannot be unpacked
            died = isinstance(error, self.ray.exceptions.RayActorError)
            if died and worker.up and not worker.proving:  # its job goes on elsewhere, from its last step
                task, worker.task, worker.up = worker.task, None, False
                self.schedule.forget(worker.name)
                self._lost(worker, task, f"{worker.name} died")
                self._wait_for(worker)
                return
            if died or not worker.up:  # Ray has given its process up, or the process cannot answer who it is
                worker.up = False
                value_or(lambda: self.ray.kill(worker.actor), None)  # else it keeps its name from its successor
            worker.proving = False
            self._break(worker, str(error).strip().rpartition("\n")[2] if died else first_line(error))
            return
        if isinstance(answer, Outcome):
            self._ended(worker, answer)
        elif isinstance(answer, str):
            self._proved(worker, answer)
        else:
            self._came_up(worker, answer)

    def _came_up(self, worker: WorkerHandle, who: dict[str, Any]) -> None:
        """Give jobs to a worker that has started; end one that takes calls from anybody, as it runs without a token."""
        worker.host = str(who["host"])
        if who["token"]:
            worker.up = True
            return
        self.ray.kill(worker.actor)
        expected = "RAY_AUTH_MODE=token wherever `ray start` runs"
        fix = "Anyone who reaches that machine runs code on it: stop Ray there, and start it with a token."
        self._break(worker, sentence(f"a worker on {worker.host} without token mode", expected, fix))

    def _ended(self, worker: WorkerHandle, outcome: Outcome) -> None:
        """Count the worker's job as done or failed, hold it if the worker broke, or put it back, by its ``outcome``."""
        task, worker.task = worker.task, None
        if task is None:
            return
        if outcome.status == DONE:
            worker.finished += 1
            self.tally.done += 1
            self._open.discard(task.key)
            self.say(f"{task.key[:12]} done by {worker.name} in {outcome.seconds:.1f} s")
            self._succeeded(worker, task)
        elif outcome.status == CANCELLED and task.key not in self.folder.cancelled():  # asked for again meanwhile
            self.schedule.put_back(task)
        elif outcome.status in (FAILED, CANCELLED):
            self._fail(task, outcome.text)
        elif outcome.status == BROKEN:
            worker.held = task
            self._break(worker, outcome.text)
        else:
            worker.error = f"{worker.name} on {worker.host}: {outcome.text}"
            if outcome.status == LOST:
                self._lost(worker, task, outcome.text)
                return
            self.say(worker.error)
            task.refused[worker.name] = outcome.text
            if outcome.status == UNABLE:
                self._unable(worker, task)
            self.schedule.put_back(task, begun=outcome.status != UNABLE)
            self._fail_if_refused(task)

    def _succeeded(self, worker: WorkerHandle, task: Task) -> None:
        """Note that ``worker`` has loaded the model of ``task``; its suspect of that model is then itself at fault."""
        self.schedule.accept(worker.name, task.model)
        worker.sound[task.model] = worker.sound.get(task.model, 0) + 1
        if worker.suspect is not None and worker.suspect.model == task.model:
            suspect, worker.suspect = worker.suspect, None
            self._fail_if_refused(suspect)

    def _unable(self, worker: WorkerHandle, task: Task) -> None:
        """Suspect a job whose model ``worker`` could not load; if it has a suspect already, the model rests instead."""
        done = worker.sound.get(task.model, 0)
        done_before, _ = task.unable.setdefault(worker.name, (done, task.refused[worker.name]))
        if done > done_before:
            return  # others were done between its failures: it is the job
        if worker.suspect is None:
            worker.suspect = task
        else:
            del task.refused[worker.name]
            self._rest_model(worker, worker.suspect)

    def _rest_model(self, worker: WorkerHandle, suspect: Task) -> None:
        """Let the model of ``suspect`` rest on ``worker`` for a while: it is at fault, and the job is not refused."""
        worker.suspect = None
        suspect.refused.pop(worker.name, None)
        self.schedule.refuse(worker.name, suspect.model, self.clock())

    def _lost(self, worker: WorkerHandle, task: Task | None, why: str) -> None:
        """Count a death at ``task``, and put the job back; fail it after several deaths without a further step."""
        worker.deaths += 1
        self.tally.deaths += 1
        if task is None:
            return
        reached = value_or(lambda: self.reached(task), self._steps.get(task.key, 0.0))  # its share may not answer
        task.deaths = task.deaths + 1 if reached <= self._steps.get(task.key, 0) else 1
        self._steps[task.key] = reached
        if task.deaths >= MOST_DEATHS:
            self._fail(task, f"{task.deaths} workers died at this job without a further step, at last: {why}")
        else:
            self.say(f"{task.key[:12]}: {why.rstrip('.')}; the job goes on{' from its last step' if reached else ''}")
            self.schedule.put_back(task)

    def _break(self, worker: WorkerHandle, text: str) -> None:
        """Give ``worker`` no jobs for a while, as with a full disk; hold its job, put it back if its process died."""
        if worker.broken != text:
            worker.error = f"{worker.name} on {worker.host}: {text}" if worker.host else f"{worker.name}: {text}"
            self.say(worker.error)
        worker.broken = text
        worker.rest.begin(self.clock())
        if worker.task is not None:
            worker.held, worker.task = worker.task, None
        if not worker.up:
            self._release(worker)

    def _prove(self, worker: WorkerHandle) -> None:
        """Have a worker that has rested prove itself; one that Ray has given up is started anew first."""
        try:
            if worker.up:
                self._calls[worker.actor.prove.remote()] = worker
                worker.proving = True
            elif worker not in self._calls.values():
                worker.actor = worker.start()
                self._wait_for(worker)
        except Exception as error:  # of Ray's many kinds
            self._break(worker, first_line(error))

    def _proved(self, worker: WorkerHandle, fault: str) -> None:
        """Replace the process of a worker with a ``fault``; give a sound one jobs, and requeue or fail its held one."""
        worker.proving = False
        if fault:
            self._release(worker)
            self._break(worker, fault)
            self.schedule.forget(worker.name)
            self.ray.kill(worker.actor, no_restart=False)
            self._wait_for(worker)
            return
        reason, worker.broken, worker.rest = worker.broken, "", Rest()
        worker.faults += 1
        if worker.held is not None:
            worker.held.faults += 1
            if worker.held.faults >= MOST_DEATHS:
                task, worker.held = worker.held, None
                self._fail(task, f"{task.faults} times a machine failed at it that was sound right after: {reason}")
        self._release(worker)

    def _release(self, worker: WorkerHandle) -> None:
        """Put back the job at which ``worker`` broke, if any."""
        if worker.held is not None:
            self.schedule.put_back(worker.held)
            worker.held = None

    def _fail(self, task: Task, text: str) -> None:
        """Count a job that does not wait as failed or cancelled, and write down why."""
        self._notes[task.key] = text
        self._try("the notes of failed jobs", self._write_notes)
        self.tally.failed[task.key] = text
        self._open.discard(task.key)
        self.say(f"{task.key[:12]} failed: {text}")

    def _write_notes(self) -> None:
        """Write down why jobs failed, also what the folder did not take before; after all, raises the last OSError."""
        refused = None
        for key, text in list(self._notes.items()):
            try:
                self.folder.fail(key, text)
                del self._notes[key]
            except OSError as error:
                refused = error
        if refused is not None:
            raise refused

    def _may(self, worker: WorkerHandle, task: Task) -> bool:
        """True while ``worker`` may still do a waiting job: it has not refused the job, except as its suspect, nor
        rested too often from all jobs or the model, nor is it late to start while others have refused the job."""
        if worker.name in task.refused:
            return worker.suspect is task
        if worker.broken:
            return worker.rest.count < MOST_RESTS
        if task.refused and not worker.up and self.clock() - worker.began > START_SECONDS:
            return False
        return self.schedule.refusals(worker.name, task.model) < MOST_RESTS

    def _fail_if_refused(self, task: Task) -> None:
        """Fail a waiting job that was refused and that no worker may do any more, with a reason from each machine."""
        if not task.refused or any(self._may(worker, task) for worker in self.workers):
            return
        if not self.schedule.remove(task):  # another worker has it meanwhile
            return
        by_host = {worker.host: text for worker in self.workers if (text := task.refused.get(worker.name))}
        texts = set(by_host.values())
        self._fail(task, "; ".join(texts if len(texts) == 1 else map(": ".join, by_host.items())))

    def _give_up_what_nobody_can(self) -> None:
        """Fail the jobs that every worker has refused, while none is busy. A run also gives up those whose machines or
        models failed too often, but writes no note: the jobs may be sound."""
        if any(worker.task or worker.held for worker in self.workers):
            return
        for task in self.schedule.waiting():
            if task.refused:
                self._fail_if_refused(task)
            elif not self.watching and not any(self._may(worker, task) for worker in self.workers):
                self.schedule.remove(task)
                own = [text for _, text in task.unable.values()]
                reasons = "; ".join(dict.fromkeys(own or [worker.error for worker in self.workers]))
                self.tally.failed[task.key] = reasons
                self._open.discard(task.key)
                self.say(f"{task.key[:12]} waits for a machine that can do it: {reasons}")

    def report_lacking(self) -> None:
        """Say what workers that cannot start wait for: once, or each minute where a cluster may grow. Raises
        UnsupportedError for a run whose cluster cannot grow, after a moment for machines that are joining."""
        lack = None if any(worker.host for worker in self.workers) else lacking(self.ray, self.asked)
        self._lack = "" if lack is None else str(lack)
        if lack is None:
            return
        now, grows, reminded = self.clock(), autoscales(self.ray), math.isfinite(self._reminded)
        if not grows and not self.watching and now - self._began >= LACK_SECONDS:
            raise lack
        if (now - self._reminded >= REMIND_SECONDS) if grows else (self.watching and not reminded):
            self._reminded = now
            self.say(str(lack))

    def _cancel(self) -> None:
        """End the jobs, waiting or running, that the folder has as cancelled."""
        keys = self.folder.cancelled() & self._open
        if not keys:
            return
        for task in self.schedule.drop(keys):
            self._fail(task, CANCELLED)
        for worker in self.workers:
            if worker.task is not None and worker.task.key in keys:
                worker.actor.cancel.remote(worker.task.key)

    def _read_jobs(self) -> None:
        """Add the jobs of files that are new or changed; a file that cannot be read now is tried again."""
        for path in self.folder.job_files():
            status = value_or(path.stat, None)
            changed = () if status is None else (status.st_size, status.st_mtime_ns, status.st_ino)
            if changed and self._read.get(path) != changed:
                add = partial(self.add, lines_in([path], self.say, waits=True), again=False, where=f"{path.name!r}: ")
                if self._try(f"the jobs in {path.name!r}", add):
                    self._read[path] = changed

    def _show(self) -> None:
        """Write down what the workers do, for those who see only the folder."""
        now = self._shown = self.clock()
        states = [
            {
                "worker": worker.name, "host": worker.host, "job": worker.task.key if worker.task else "",
                "state": worker.state, "seconds": round(now - worker.began, 1) if worker.task else 0.0,
                "finished": worker.finished, "deaths": worker.deaths,
                "error": worker.error or ("" if worker.host else self._lack),
            }
            for worker in self.workers
        ]  # fmt: skip
        self.folder.write_workers(self.name, states)


def lines_in(paths: Iterable[Path], say: Say, waits: bool = False) -> Iterator[str]:
    """The lines of job files. An unreadable file is reported to ``say``, or raised if ``waits`` and it may recover."""
    for path in paths:
        try:
            yield from each_line(path)
        except PackError as error:
            if waits and not isinstance(error.__cause__, PackError):
                raise
            say(f"set aside: {error}")
