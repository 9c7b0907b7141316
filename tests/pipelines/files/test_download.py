"""Downloads by the real huggingface_hub from a small Hub on this computer: whole, resumed, checked, or one line."""

import contextlib
import hashlib
import json
import math
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
import huggingface_hub.constants
import published
import pytest
import tqdm
from anygpu.compat.checkpoints.headers import STORED
from anygpu.compat.errors import CheckpointError, InputError, MissingPackageError
from anygpu.pipelines.base import Silent
from anygpu.pipelines.family import HUB, Download, Offer
from anygpu.pipelines.files import catalogue, download
from anygpu.pipelines.files.catalogue import absent_offers, every_offer
from anygpu.pipelines.files.download import fetched, is_checked, selected
from anygpu.pipelines.registry import FAMILIES

REVISION = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "Lightricks/LTX-Video"
HUB_FILES = ("model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae")
DOWNLOAD = Download(REPOSITORY, REVISION, HUB_FILES)
LARGE = "transformer/diffusion_pytorch_model.safetensors"
FILES = {
    "model_index.json": b'{"_class_name": "LTXPipeline"}',
    "transformer/config.json": b"{}",
    LARGE: bytes(range(256)) * 8192,
    "text_encoder/model.bf16.safetensors": b"narrow" * 1000,
    "text_encoder/model.safetensors.index.bf16.json": b"{}",
    "text_encoder/model-00001-of-00001.safetensors": b"wide" * 3000,
    "text_encoder/model.safetensors.index.json": b"{}",
    "tokenizer/spiece.model": b"pieces",
    "tokenizer/chat_template.jinja": b"{{ messages }}",
    "vae/diffusion_pytorch_model.bin": b"a pickle",
    "ltx-video-2b-v0.9.safetensors": b"the release, as one file",
    "README.md": b"# words",
}
SMALL = ("config.json", "model_index.json", ".index.bf16.json", ".model", ".jinja", ".bf16.safetensors")
WANTED = sorted(name for name in FILES if name.endswith(SMALL) or name == LARGE)


@dataclass
class Hub:
    """What the server has, what it was asked for, and what is wrong with it."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    served: dict[str, bytes] = field(default_factory=dict)  # instead of what it says it has
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, file, range
    hold: str = ""  # a file whose second half waits for `go`
    go: threading.Event = field(default_factory=threading.Event)
    halfway: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def gets(self, name: str) -> list[str]:
        return [span for method, asked, span in self.asked if (method, asked) == ("GET", name)]

    def tree(self) -> list[dict[str, Any]]:
        found = []
        for name, content in self.files.items():
            sha, blob = hashlib.sha256(content).hexdigest(), hashlib.sha1(b"blob %d\0" % len(content) + content)
            entry = {"type": "file", "path": name, "size": len(content), "oid": blob.hexdigest()}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 134}
            found.append(entry)
        return [{"type": "directory", "path": "transformer", "size": 0, "oid": "0" * 40}, *found]


def handler(hub: Hub) -> type:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each answer waits 40 ms between head and body

        def log_message(self, *_: Any) -> None: ...

        def answer(self, status: int, body: bytes, **headers: Any) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()

        def do_HEAD(self) -> None:
            self.respond(body=False)

        def do_GET(self) -> None:
            self.respond(body=True)

        def respond(self, body: bool) -> None:
            path = urlsplit(self.path).path
            head, _, name = path.partition(f"/{REVISION}")
            name = name.strip("/")
            hub.asked.append((self.command, name or "tree", self.headers.get("Range", "")))
            if not head.endswith((f"/api/models/{REPOSITORY}/tree", f"/{REPOSITORY}/resolve")) or path == head:
                self.answer(404, b"", X_Error_Code="RevisionNotFound")
                return
            if not name:
                text = json.dumps(hub.tree()).encode()
                self.answer(200, text, Content_Type="application/json")
                self.wfile.write(text)
                return
            content = hub.served.get(name, hub.files[name])
            entry = next(entry for entry in hub.tree() if entry["path"] == name)
            etag = entry.get("lfs", entry)["oid"]
            first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            part = content[first:]
            span = {"Content_Range": f"bytes {first}-{len(content) - 1}/{len(content)}"} if first else {}
            about = {"ETag": f'"{etag}"', "X_Repo_Commit": REVISION, "X_Linked_Etag": f'"{etag}"', **span}
            self.answer(206 if first else 200, part, X_Linked_Size=len(content), **about)
            if not body:
                return
            if name == hub.hold and not first:
                self.wfile.write(part[: len(part) // 2])
                hub.halfway.set()
                hub.go.wait()
                part = part[len(part) // 2 :]
            with contextlib.suppress(ConnectionError):  # who asked may have gone
                self.wfile.write(part)

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one repository, which the first family's model is; its bytes come in small pieces."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 65536)
    monkeypatch.setattr(catalogue, "offers", lambda: {"LTX-Video": Offer((DOWNLOAD,), {"all": 0.1})})
    monkeypatch.setattr(download, "WAIT_SECONDS", 0.01)
    found = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(found))
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield found
    found.go.set()
    server.shutdown()
    server.server_close()


class Listening(Silent):
    """Remembers what it was told, and cancels when it is asked to, not before so many bytes have come."""

    def __init__(self, cancel: threading.Event | None = None, past: int = 0) -> None:
        self.past = past
        self.told: list[tuple[int, int, str]] = []
        self.cancel = cancel

    def step(self, done: int, total: int, stage: Any, preview: Any = None) -> None:
        self.told.append((done, total, str(stage)))

    def check(self) -> None:
        came = max((done for done, _, _ in self.told), default=0)
        if self.cancel is not None and self.cancel.is_set() and came >= self.past:
            raise KeyboardInterrupt


def run(hub: Hub, root: Path, progress: Any = None, choice: str = "download") -> list[str]:
    return fetched("LTX-Video", choice, [root], progress or Silent(), hub.url)


def there(root: Path) -> dict[str, bytes]:
    folder = root / DOWNLOAD.folder
    names = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return {name: (folder / name).read_bytes() for name in names if not name.startswith(".cache")}


def test_what_is_read_is_fetched_checked_and_not_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    lines = run(hub, tmp_path, choice="no")
    assert not hub.asked and not list(tmp_path.iterdir()), "looking must ask nobody and write nothing"
    assert "is not there" in lines[0] and "nothing was downloaded" in lines[1]
    progress = Listening()
    (line,) = run(hub, tmp_path, progress)
    assert there(tmp_path) == {name: FILES[name] for name in WANTED}
    assert line.endswith(f"is whole: {len(WANTED)} files as {REPOSITORY} has them")
    assert all(done <= total == sum(len(FILES[n]) for n in WANTED) for done, total, _ in progress.told)
    assert is_checked(tmp_path / DOWNLOAD.folder, DOWNLOAD)
    hub.asked.clear()
    assert (
        "was checked against" in run(hub, tmp_path)[0] and "was checked against" in run(hub, tmp_path, choice="no")[0]
    )
    assert not hub.asked
    (tmp_path / DOWNLOAD.folder / "model_index.json").write_bytes(b"{}")
    assert "not checked" in run(hub, tmp_path, choice="no")[0]


def test_a_cancel_ends_it_while_the_network_is_waited_for_and_it_goes_on_from_there(hub: Hub, tmp_path: Path) -> None:
    hub.hold = LARGE
    with pytest.raises(KeyboardInterrupt):
        run(hub, tmp_path, Listening(cancel=hub.halfway, past=10_000))
    assert not hub.go.is_set(), "the server still holds the answer back"
    assert LARGE not in there(tmp_path), "nothing half is under its own name"
    hub.go.set()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("download ")]:
        thread.join()
    hub.hold = ""
    run(hub, tmp_path)
    first, second = hub.gets(LARGE)
    assert not first and int(second.removeprefix("bytes=").rstrip("-")) > 0, "it began anew"
    assert there(tmp_path)[LARGE] == FILES[LARGE]


@pytest.mark.parametrize("what", ["a list", "a file"])
def test_a_hub_that_falls_silent_is_not_waited_for(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(download, "SILENT_SECONDS", 0.3)
        if what == "a list":
            patch.setattr(huggingface_hub.HfApi, "list_repo_tree", lambda *_, **__: hub.go.wait() and [])
        hub.hold = LARGE
        for _ in range(2):  # the second run waits for the thread of the first, which is not heard of either
            with pytest.raises(CheckpointError, match=r"cannot be reached .*nothing came for .*to resume"):
                run(hub, tmp_path)
    hub.go.set()
    run(hub, tmp_path)
    assert there(tmp_path)[LARGE] == FILES[LARGE]


def test_a_damaged_file_is_found_by_its_hash_removed_and_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    hub.served[LARGE] = b"x" * len(FILES[LARGE])
    with pytest.raises(CheckpointError, match=rf"'{LARGE}' in .* has another hash; expected .* as the Hub has them"):
        run(hub, tmp_path)
    assert LARGE not in there(tmp_path) and not is_checked(tmp_path / DOWNLOAD.folder, DOWNLOAD)
    hub.served.clear()
    hub.asked.clear()
    run(hub, tmp_path)
    assert there(tmp_path)[LARGE] == FILES[LARGE] and not hub.gets("tokenizer/spiece.model")


def test_a_folder_of_another_root_is_completed_where_it_is(hub: Hub, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (second / DOWNLOAD.folder).mkdir(parents=True)
    (second / DOWNLOAD.folder / "model_index.json").write_bytes(FILES["model_index.json"])
    line, *_ = fetched("LTX-Video", "no", [first, second], Silent(), hub.url)
    assert line.startswith(f"{second / DOWNLOAD.folder} is there")
    fetched("LTX-Video", "download", [first, second], Silent(), hub.url)
    assert sorted(there(second)) == WANTED and not first.exists() and not hub.gets("model_index.json")


@pytest.mark.full
@pytest.mark.parametrize("other", [b"more bytes than the Hub's", b"", b"x" * len(FILES["tokenizer/spiece.model"])])
def test_a_file_that_was_there_before_stays_as_it_was(hub: Hub, tmp_path: Path, other: bytes) -> None:
    path = tmp_path / DOWNLOAD.folder / "tokenizer" / "spiece.model"
    path.parent.mkdir(parents=True)
    path.write_bytes(other)
    with pytest.raises(CheckpointError, match=r"spiece\.model' of another version; .* Rename this folder or delete"):
        run(hub, tmp_path)
    assert path.read_bytes() == other and not is_checked(tmp_path / DOWNLOAD.folder, DOWNLOAD)
    assert len(other) == len(FILES["tokenizer/spiece.model"]) or not hub.gets(LARGE), "what lies there is seen first"
    path.unlink()
    run(hub, tmp_path)
    assert there(tmp_path) == {name: FILES[name] for name in WANTED}


@pytest.mark.parametrize("damaged", [False, True])
def test_a_folder_that_is_a_link_is_compared_too(hub: Hub, tmp_path: Path, damaged: bool) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    run(hub, other)
    (root / DOWNLOAD.folder).mkdir(parents=True)
    (root / DOWNLOAD.folder / "transformer").symlink_to(other / DOWNLOAD.folder / "transformer", True)
    hub.asked.clear()
    if not damaged:
        (other / DOWNLOAD.folder / "transformer" / "config.json").unlink()  # fetched through the link
        run(hub, root)
        assert not hub.gets(LARGE) and is_checked(root / DOWNLOAD.folder, DOWNLOAD)
        assert {**there(root), **{n: c for n, c in there(other).items() if "transformer" in n}} == there(other)
        return
    (other / DOWNLOAD.folder / LARGE).write_bytes(b"x" * len(FILES[LARGE]))
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model\.safetensors' of another version"):
        run(hub, root)


def test_a_part_that_is_too_long_is_begun_anew(hub: Hub, tmp_path: Path) -> None:
    part = download._part_of(tmp_path / DOWNLOAD.folder, LARGE, REVISION)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"y" * (len(FILES[LARGE]) + 1))
    run(hub, tmp_path)
    assert there(tmp_path)[LARGE] == FILES[LARGE] and hub.gets(LARGE) == [""]


def test_a_run_waits_for_the_check_that_a_cancelled_one_began(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checking, go, checks = threading.Event(), threading.Event(), []
    verify = huggingface_hub.HfApi.verify_repo_checksums

    def slow(*args: Any, **named: Any) -> Any:
        checks.append(1)
        checking.set()
        go.wait()
        return verify(*args, **named)

    monkeypatch.setattr(huggingface_hub.HfApi, "verify_repo_checksums", slow)
    with pytest.raises(KeyboardInterrupt):
        run(hub, tmp_path, Listening(cancel=checking))
    threading.Timer(0.05, go.set).start()
    assert "was checked against" in run(hub, tmp_path)[0] and len(checks) == 1


def test_what_cannot_be_is_one_line(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="model 'Wan'; expected one of LTX-Video"):
        fetched("Wan", "no", [tmp_path], Silent())
    with pytest.raises(InputError, match="download 'yes'; expected one of no, download"):
        run(hub, tmp_path, choice="yes")
    other = replace(DOWNLOAD, revision="f" * 40)
    with monkeypatch.context() as patch:
        patch.setattr(catalogue, "offers", lambda: {"LTX-Video": Offer((other,), {"all": 0.1})})
        with pytest.raises(CheckpointError, match=rf"has no commit f{{40}}; .*Update AnyGPU, or download {HUB}"):
            run(hub, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(catalogue.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * 10**8))
        other = tmp_path / DOWNLOAD.folder / download.PARTS / "of-something-else.incomplete"
        other.parent.mkdir(parents=True)
        with other.open("wb") as file:
            file.truncate(2**30)
        with pytest.raises(InputError, match=r"0\.5 GB free on the disk of .*; expected 1\.1 GB\. .* is_default: true"):
            run(hub, tmp_path)
        shutil.rmtree(tmp_path / DOWNLOAD.folder)
    with monkeypatch.context() as patch:
        patch.delattr(huggingface_hub.HfApi, "verify_repo_checksums")
        with pytest.raises(MissingPackageError, match=r"which checks no hashes; expected 1\.1 or newer"):
            run(hub, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(CheckpointError, match=r"cannot be reached .*Go online and run again to resume"):
            run(hub, tmp_path)
    (tmp_path / DOWNLOAD.folder).write_text("a file where the folder goes")
    with pytest.raises(CheckpointError, match="cannot be written"):
        run(hub, tmp_path)


def test_one_set_of_weights_of_each_folder_is_chosen() -> None:
    sizes = {name: len(content) for name, content in FILES.items()}
    assert sorted(selected(sizes, HUB_FILES)) == sorted(WANTED)
    assert "ltx-video-2b-v0.9.safetensors" in selected(sizes, ())
    assert not selected(dict.fromkeys(("C:a.json", "..\\a.json", "a/../../b.json", "/a.json"), 1), ())


def test_what_is_not_here_is_offered_with_what_its_download_means(tmp_path: Path) -> None:
    (tmp_path / "HunyuanVideo").mkdir()
    all_of_them = absent_offers((), [tmp_path / "not" / "yet"])
    assert [offer["title"] for offer in all_of_them.values()] == list(every_offer())
    absent = absent_offers({"LTX-Video": tmp_path}, [tmp_path])
    assert set(all_of_them) - set(absent) == {"LTX-Video"}
    text = absent["FramePackI2V_HY"]["text"]
    assert text.startswith("43 GB to download, 42 GB of weights in bf16; ") and " GB free on the disk. " in text
    for folder in ("FramePackI2V_HY", "HunyuanVideo", "flux_redux_bfl"):
        assert f"into {tmp_path / folder}\n" in text
    assert "licences" in text.splitlines()[-1]


def test_each_model_on_offer_is_fixed_at_a_commit() -> None:
    for model in (model for offer in every_offer().values() for model in offer.downloads):
        assert len(model.revision) == 40 and set(model.revision) <= set("0123456789abcdef")
        assert model.page == HUB + model.repository


@pytest.mark.full
def test_a_part_of_what_was_fetched_is_there_too(hub: Hub, tmp_path: Path) -> None:
    run(hub, tmp_path)
    folder = tmp_path / DOWNLOAD.folder
    assert is_checked(folder, replace(DOWNLOAD, only=("transformer",)))
    assert not is_checked(folder, replace(DOWNLOAD, only=("transformer", "image_encoder")))
    assert not is_checked(folder, replace(DOWNLOAD, only=()))
    assert not is_checked(folder, replace(DOWNLOAD, revision="f" * 40))
    part = replace(DOWNLOAD, only=("image_encoder",))
    download._note(folder, part, {})
    assert is_checked(folder, part) and is_checked(folder, DOWNLOAD), "another part of the same commit is one more"
    newer = replace(DOWNLOAD, revision="f" * 40)
    download._note(folder, newer, {})
    assert is_checked(folder, newer) and not is_checked(folder, DOWNLOAD), "another commit takes the place of the first"


# Folder of what is offered to the published shapes of each part, and the dtype in which they are stored there.
STORED_AS = {
    "LTX-Video": {"text_encoder": ("t5", "F32"), "transformer": ("ltx", "F32"), "vae": ("ltx", "F32")},
    "LTX-Video-0.9.5": {"text_encoder": ("t5", "F32"), "transformer": ("ltx", "BF16"), "vae": ("ltx 0.9.5", "BF16")},
    "mochi-1-preview": {"text_encoder": ("t5", "F32"), "transformer": ("mochi", "BF16"), "vae": ("mochi", "BF16")},
    "HunyuanVideo": {
        "text_encoder": ("llama", "F16"),
        "text_encoder_2": ("clip_l", "F16"),
        "transformer": ("hunyuan_video", "BF16"),
        "vae": ("hunyuan_video", "F32"),
    },
    "HunyuanVideo-1.5-Diffusers-480p_i2v": {
        "text_encoder": ("qwen2_5_vl", "BF16"),
        "text_encoder_2": ("byt5", "F32"),
        "transformer": ("hunyuan_video_15", "F32"),
        "vae": ("hunyuan_video_15", "F32"),
        "image_encoder": ("siglip", "BF16"),
    },
    "FramePack_F1_I2V_HY_20250503": {"": ("framepack", "BF16")},
}


def shapes_of(part: str, name: str) -> published.Shapes:
    """Names and shapes of a part as diffusers and transformers store it: what is tied, once."""
    if "encoder" in part:
        shapes = published.encoder("t5", 1) if name == "byt5" else published.encoder(name)
        return {key: shape for key, shape in shapes.items() if key != "encoder.embed_tokens.weight"}
    if part == "vae":
        return published.vae("ltx", 2) if name == "ltx 0.9.5" else published.vae(name)
    (first, *_) = json.loads((FAMILIES[name].folder / "transformer.json").read_text())
    return published.shapes_of_config(first["config"])


@pytest.mark.full
@pytest.mark.parametrize("folder", STORED_AS)
def test_the_bytes_of_an_offer_are_those_of_its_tensors_and_headers(folder: str) -> None:
    """Headers take a thousandth at most. Of Mochi, LTX-Video, HunyuanVideo and FramePack the Hub lists the same."""
    downloads = (download for offer in every_offer().values() for download in offer.downloads)
    sizes = next(download.sizes for download in downloads if download.folder == folder)
    assert set(sizes) == set(STORED_AS[folder])
    for part, (name, dtype) in STORED_AS[folder].items():
        tensors = sum(map(math.prod, shapes_of(part, name).values())) * STORED[dtype].itemsize
        assert tensors < sizes[part] < 1.001 * tensors, part


def test_a_drive_that_is_not_there_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the root of such a drive, as Windows has them, is only that root again."""
    asked = []

    def absent(path: Path) -> bool:
        asked.append(path)
        assert len(asked) < 10, "asked for ever"
        return False

    monkeypatch.setattr(Path, "is_dir", absent)
    assert catalogue.free_bytes(Path("/z/models/diffusers")) == 0


def test_a_bar_of_a_download_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor", None)
    before = threading.active_count()
    bars = [download._bar(download.Fetched())(total=5) for _ in range(3)]
    assert threading.active_count() == before and len(bars) == 3
