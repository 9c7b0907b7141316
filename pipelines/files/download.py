"""A published model's download with huggingface_hub, at a fixed commit, of the files that are read, resumed and
checked. A folder whose files matched the Hub's hashes keeps a note of that, so that it is not checked again."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...compat.durable import replacing, write_json
from ...compat.errors import CheckpointError, InputError, MissingPackageError, PackError, json_file, require_choice
from ...compat.memory.statistics import amount
from ...compat.packages import imported
from ..base import Progress, ProgressStage
from ..family import Download
from .catalogue import folder_of, free_bytes, offer_of, stored_for, variants_of

CHOICES = ("no", "download")  # grows at the end
SMALL_FILES = (".json", ".txt", ".model", ".jinja")  # settings, vocabularies, templates of chats
NARROW = ".bf16"  # in the names of a second set of weights, of half the size
OUTSIDE = re.compile(r"[\\:]|(^|/)\.\.(/|$)")  # a name that may lead out of the folder, on Windows too
ROOM_BYTES = 2**30  # left free on the disk
WAIT_SECONDS = 0.1  # between two looks at a cancel
SILENT_SECONDS = 120.0  # without a byte: huggingface_hub tries a file five times, 10 s each, and may wait for ever
HASHED_BYTES = 2**20  # between two looks at a cancel, too
PARTS = Path(".cache", "huggingface", "download")  # where huggingface_hub keeps what is not whole
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)  # of a note that was edited
NOTE = Path(".cache", "huggingface", "anygpu-checked-2.json")  # counts with SMALL_FILES


class Cancelled(Exception):
    """Ends a download that was cancelled."""


@dataclass(slots=True)
class Fetched:
    done: int = 0  # bytes
    total: int = 0  # bytes
    stage: str = "downloading"  # what is done now
    stopped: bool = False
    failure: BaseException | None = None
    heard: float = field(default_factory=time.monotonic)  # when the Hub last sent something


def fetched(
    title: str, choice: str, roots: Sequence[Path], progress: Progress, endpoint: str | None = None, card_bytes: int = 0
) -> list[str]:
    """Lines on which files of a model are there, one per repository. The ``choice`` ``download`` fetches the rest, and
    ``no`` uses no network, writes nothing, and adds advice for a card of ``card_bytes``, 0 for none.

    Raises InputError for an unknown choice, or no room on the disk; CheckpointError where the Hub, or another one at
    ``endpoint``, cannot be reached or has no such commit, or a file is another; MissingPackageError for no
    huggingface_hub, or one that is too old."""
    offer = offer_of(title)
    require_choice("download", choice, CHOICES)
    lines = []
    for download in offer.downloads:
        folder = folder_of(download, roots)
        if choice == "no" or is_checked(folder, download):
            lines.append(_in_one_line(download, folder))
            continue
        files = _fetch(download, folder, progress, endpoint)
        whole = f"{folder} is whole: {len(files)} files as {download.repository} has them"
        lines.append(whole if files else _in_one_line(download, folder))
    if choice == "download":
        return lines
    advice = filter(None, (stored_for(offer, card_bytes), variants_of(title)))
    return [*lines, f"{offer.size}; nothing was downloaded", *advice]


def is_checked(folder: Path, download: Download) -> bool:
    """True if the folder's note says that all of ``download`` matched the Hub, and the files have not changed since."""
    try:
        note = json_file(folder / NOTE)
        had = any(
            revision == download.revision and (not only or (download.only and set(download.only) <= set(only)))
            for revision, only in note["fetched"]
        )
        return had and all(_stamp(folder / name) == stamp for name, stamp in note["files"].items())
    except DAMAGED:
        return False


def selected(files: Mapping[str, int], only: tuple[str, ...]) -> dict[str, int]:
    """Path to bytes of the files that are read of a repository, or of its folders ``only``: settings, vocabularies, and
    safetensors, the bf16 set alone where a folder has one too. Names that may lead out of it are dropped."""
    within = (name for name in files if not name.startswith("/") and not OUTSIDE.search(name))
    wanted = {name: files[name] for name in within if not only or name.split("/")[0] in only}
    weights = [name for name in wanted if name.endswith(".safetensors")]
    narrow = {name.rpartition("/")[0] for name in weights if NARROW in name}
    sizes = {}
    for name, size in wanted.items():
        is_index = ".safetensors.index" in name
        if not (name.endswith(SMALL_FILES) or name in weights):
            continue
        if (name in weights or is_index) and name.rpartition("/")[0] in narrow and NARROW not in name:
            continue
        sizes[name] = size
    return sizes


def _in_one_line(download: Download, folder: Path) -> str:  # tells the user what is there of a download
    if is_checked(folder, download):
        return f"{folder} is complete and was checked against {download.repository}"
    there = "is there, but not checked" if folder.is_dir() and any(folder.iterdir()) else "is not there"
    return f"{folder} {there}; download fetches {download.page} at {download.revision[:12]}"


def _fetch(download: Download, folder: Path, progress: Progress, endpoint: str | None) -> dict[str, int]:
    """Fetch and check ``download`` in a thread, so that a cancel is obeyed meanwhile; returns path to bytes of files.
    A cancelled earlier run that still checks is waited for; where that finishes the work, the result is empty."""
    hub = imported("huggingface_hub")
    if not hasattr(hub.HfApi, "verify_repo_checksums"):
        found = f"huggingface_hub {hub.__version__}, which checks no hashes"
        fix = "Install it into the Python that runs ComfyUI or anygpu: python -m pip install -U huggingface_hub"
        raise MissingPackageError(found, expected="1.1 or newer", fix=fix)
    state, files, names = Fetched(), dict[str, int](), (f"download {folder}", f"check {folder}")
    earlier = [thread for thread in threading.enumerate() if thread.name in names]

    def work() -> None:
        try:
            for thread in earlier:
                thread.join()
            state.heard = time.monotonic()
            if not state.stopped and not is_checked(folder, download):
                files.update(_transferred(hub, download, folder, state, endpoint))
        except BaseException as error:  # raised again by the thread that waits
            state.failure = error

    thread = threading.Thread(target=work, name=names[0], daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(WAIT_SECONDS)
            progress.check()
            asks = next((other for other in earlier if other.is_alive()), thread).name == names[0]  # not checking
            if asks and time.monotonic() - state.heard > SILENT_SECONDS:
                raise _failed(download, folder, TimeoutError(f"nothing came for {SILENT_SECONDS:g} s"))
            if state.total:
                text = f"{download.folder} {amount(state.done, state.total)}"
                progress.step(min(state.done, state.total), state.total, ProgressStage(state.stage, text, True))
    finally:
        state.stopped = True
    if isinstance(state.failure, PackError):
        raise state.failure
    if state.failure is not None:
        raise _failed(download, folder, state.failure) from state.failure
    return files


def _transferred(hub: Any, download: Download, folder: Path, state: Fetched, endpoint: str | None) -> dict[str, int]:
    """Fetch what is missing, compare every file's hash with the Hub's, and note it; returns path to bytes of them.
    Raises CheckpointError for nothing to fetch, files of another version, or damaged ones; Cancelled when stopped."""
    api = hub.HfApi(endpoint=endpoint)
    tree = api.list_repo_tree(download.repository, recursive=True, revision=download.revision)
    entries = {entry.path: entry for entry in tree if hasattr(entry, "size")}
    files = selected({name: entry.size for name, entry in entries.items()}, download.only)
    if not files:
        found = f"{download.page} at {download.revision} has nothing to fetch"
        fix = "Please report this: AnyGPU names the commit."
        raise CheckpointError(found, expected=f"safetensors in {', '.join(download.only) or 'it'}", fix=fix)
    _require_version(folder, [n for n, size in files.items() if _size(folder / n) not in (None, size)], download)
    _require_room(folder, files, download.revision)
    state.total, state.heard, new = sum(files.values()), time.monotonic(), set[str]()
    for name, size in files.items():
        before = state.done
        if _size(folder / name) != size:
            new.add(name)
            url = hub.hf_hub_url(download.repository, name, revision=download.revision, endpoint=endpoint)
            _transfer(url, folder / name, _part_of(folder, name, download.revision), size, _bar(state))
        state.done = before + size
    if state.stopped:
        raise Cancelled
    state.stage = "checking"
    threading.current_thread().name = f"check {folder}"  # tells `_fetch` that no more bytes are to come
    compared = api.verify_repo_checksums(download.repository, revision=download.revision, local_dir=folder)
    mismatched = {mismatch["path"] for mismatch in compared.mismatches} & files.keys()
    absent = {name for name in compared.missing_paths if name in files}
    linked = {name for name in absent if _size(folder / name) is not None}  # the Hub's check follows no folder links
    mismatched |= {name for name in linked if not _is_same(folder / name, entries[name], state)}
    _require_same(folder, sorted(mismatched & new), sorted(absent - linked))
    _require_version(folder, sorted(mismatched), download)
    _note(folder, download, files)
    return files


def _transfer(url: str, target: Path, part: Path, size: int, bar: type) -> None:
    """Fetch a file into ``part``, from where an earlier attempt ended, and give it its own name when it is whole."""
    part.parent.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if (_size(part) or 0) > size:
        part.unlink()
    with part.open("ab") as file:
        imported("huggingface_hub.file_download").http_get(
            url,
            file,
            resume_size=file.tell(),
            headers=imported("huggingface_hub.utils").build_hf_headers(library_name="anygpu"),
            expected_size=size,
            tqdm_class=bar,
        )
        file.flush()
        os.fsync(file.fileno())  # a file of the right size counts as whole when a download goes on
    try:
        os.replace(part, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with replacing(target) as whole:  # the folder is a link to another disk
            shutil.move(part, whole)


def _is_same(path: Path, entry: Any, state: Fetched) -> bool:
    """True if a file has the Hub's hash: SHA-256 for LFS, else Git's SHA-1 of a blob; raises Cancelled when stopped."""
    digest = hashlib.sha256() if entry.lfs else hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(HASHED_BYTES):
            if state.stopped:
                raise Cancelled
            digest.update(block)
    return digest.hexdigest() == (entry.lfs.sha256 if entry.lfs else entry.blob_id)


def _part_of(folder: Path, name: str, revision: str) -> Path:
    return folder / PARTS / f"{name.replace('/', '--')}.{revision[:12]}.incomplete"


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _require_room(folder: Path, files: Mapping[str, int], revision: str) -> None:
    """Raise InputError where the disk has no room for the bytes still missing; partial files' bytes count as there."""
    absent = {name: size for name, size in files.items() if _size(folder / name) is None}
    begun = ((_size(_part_of(folder, name, revision)) or 0, size) for name, size in absent.items())
    needed = sum(absent.values()) - sum(part for part, size in begun if part <= size) + ROOM_BYTES
    free = free_bytes(folder)
    if needed > free:
        found = f"{free / 1e9:.1f} GB free on the disk of {str(folder)!r}"
        fix = "Free some space, or add another folder under diffusers in extra_model_paths.yaml, with is_default: true."
        raise InputError(found, expected=f"{needed / 1e9:.1f} GB", fix=fix)


def _require_version(folder: Path, other: Sequence[str], download: Download) -> None:
    """Raise CheckpointError where ``other`` names files of another version, which this node did not download."""
    if other:
        more = f", and {len(other) - 1} more" if len(other) > 1 else ""
        found = f"{str(folder / other[0])!r} of another version{more}"
        fix = "Rename this folder or delete the file, and run again."
        raise CheckpointError(found, expected=f"the file of {download.page} at {download.revision[:12]}", fix=fix)


def _require_same(folder: Path, damaged: Sequence[str], absent: Sequence[str]) -> None:
    """Remove ``damaged`` files, so that they are fetched again, and raise CheckpointError for these or absent ones."""
    for name in damaged:
        (folder / name).unlink(missing_ok=True)
    count, what = len(damaged) + len(absent), "has another hash" if damaged else "is missing"
    if count:
        more = f", and {count - 1} more" if count > 1 else ""
        found = f"{(*damaged, *absent)[0]!r} in {str(folder)!r} {what}{more}"
        fix = "Run this node again: damaged files were removed, and only missing files are downloaded."
        raise CheckpointError(found, expected="the files as the Hub has them", fix=fix)


def _bar(state: Fetched) -> type:
    """A progress bar class for huggingface_hub that draws nothing: it counts bytes, and ends a stopped download."""
    tqdm: Any = imported("tqdm").tqdm

    class Counting(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # else each class has a thread that never ends

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.update(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            if state.stopped:
                raise Cancelled
            state.done += int(n or 0)
            state.heard = time.monotonic()

    return Counting


def _failed(download: Download, folder: Path, error: BaseException) -> CheckpointError:
    """The error to show for a failed download: no such commit, no access, a disk that fails, or no network."""
    errors = imported("huggingface_hub.errors")
    by_hand = f"or download {download.page} into {folder} by other means."
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if isinstance(error, errors.RevisionNotFoundError):
        found, fix = f"{download.page} has no commit {download.revision}", f"Update AnyGPU, {by_hand}"
    elif isinstance(error, errors.GatedRepoError | errors.RepositoryNotFoundError):
        found = f"{download.page} is not open to this computer"
        fix = f"Accept its terms on the page and log in with `hf auth login`, {by_hand}"
    elif isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        found = f"{str(folder)!r} cannot be written ({reason})"
        fix = "Check the disk and its permissions, and run again."
    else:
        found = f"{download.page} cannot be reached ({reason})"
        fix = f"Go online and run again to resume, {by_hand}"
    return CheckpointError(found, expected=f"the files of {download.folder}", fix=fix)


def _note(folder: Path, download: Download, files: Mapping[str, int]) -> None:
    """Write into the folder's note that these files were checked, together with earlier ones of the same commit."""
    place = folder / NOTE
    fetched_before, files_before = list[Any](), dict[str, Any]()
    with suppress(*DAMAGED):
        known = json_file(place)
        if all(revision == download.revision for revision, _ in known["fetched"]):
            fetched_before, files_before = list(known["fetched"]), dict(known["files"])
    note = {
        "fetched": [*fetched_before, [download.revision, list(download.only)]],
        "files": {**files_before, **{name: _stamp(folder / name) for name in files}},
    }
    write_json(place, note)


def _stamp(path: Path) -> list[int]:  # size and time of change, which tell whether the file was edited
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
