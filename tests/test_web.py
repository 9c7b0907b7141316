"""What the pack shows in the browser, as files: scripts, style, templates, blueprints, translations."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from anygpu.pipelines.registry import FAMILIES
from PIL import Image
from test_docs import NODES

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT / "web"
SCRIPTS = sorted((*WEB.glob("*.js"), *WEB.glob("*.mjs")))
BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
MOST_BYTES, MOST_PICTURES = 50 * 1024, 600_000
LANGUAGES = ("fr", "de", "zh", "ja", "ko")

script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)


def test_the_scripts_are_small_together():
    assert len(SCRIPTS) >= 4 and not list(WEB.rglob("*.ts"))
    assert sum(path.stat().st_size for path in SCRIPTS) <= MOST_BYTES


@script
def test_a_script_has_nothing_the_registry_s_scan_flags_and_draws_nothing(path):
    text = path.read_text(encoding="utf-8")
    for banned in (
        ".connect(",
        ".bind(",
        "eval(",
        "new Function",
        "innerHTML",
        "insertAdjacentHTML",
        "onDrawForeground",
    ):
        assert banned not in text, banned
    assert not re.search(r"getContext\(|\.prototype\.\w+ =|localStorage|document\.write", text), "global or drawn"


@script
def test_an_extension_per_js_file_and_helpers_without_one(path):
    names = re.findall(r'registerExtension\(\{\s+name: "([^"]+)"', path.read_text(encoding="utf-8"))
    assert names == ([f"anygpu.{path.stem}"] if path.suffix == ".js" else [])
    assert path.read_text(encoding="utf-8").count("registerExtension(") == len(names)


@script
def test_what_the_whole_page_shares_bears_our_name(path):
    """Tabs, widgets and classes of elements, which another pack or core may have under the same name."""
    places = ('registerSidebarTab\\(\\{\\s+id: "', '(?:WIDGET|NAME) = "', 'class(?:Name =|:) "')
    shared = [name for place in places for name in re.findall(f'{place}([^" ]+)', path.read_text(encoding="utf-8"))]
    assert all(name.startswith("anygpu") for name in shared), shared


def test_the_style_is_of_our_elements_alone():
    rules = re.sub(r"/\*.*?\*/", "", (WEB / "anygpu.css").read_text(encoding="utf-8"), flags=re.DOTALL)
    selectors = [each.strip() for each in re.findall(r"(?:^|[{};])([^{};@]+){", rules)]
    strangers = [each for group in selectors for each in group.split(",") if not each.strip().startswith(".anygpu")]
    assert selectors and not strangers, strangers


@script
def test_extensions_load_their_helpers_only_when_they_are_needed(path):
    """ComfyUI imports each .js file at its start: what that imports must be ComfyUI's own and already there."""
    imports = re.findall(r'^import .* from "(.+)";$', path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if path.suffix == ".js":
        assert set(imports) <= {"../../scripts/app.js", "../../scripts/api.js"}
    for name in imports:
        assert name.startswith("../../scripts/") or (WEB / name).is_file()


@script
def test_a_script_asks_only_routes_that_exist(path):
    routes = (ROOT / "host" / "server" / "routes.py").read_text(encoding="utf-8")
    for asked in re.findall(r'\bask\("([^"]+)"', path.read_text(encoding="utf-8")):
        assert f'"{asked}"' in routes, asked


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_workflow_has_a_thumbnail(workflow):
    path = workflow.with_suffix(".jpg")
    assert path.is_file(), f"{path.name} is missing; run `make workflows`"
    with Image.open(path) as picture:
        assert picture.format == "JPEG" and picture.size == (640, 360)
    assert path.stat().st_size < 80_000


def test_the_template_browser_is_told_of_every_workflow():
    """In the order of the file; core shows hyphens of a description as spaces."""
    rows = json.loads((WEB / "templates.json").read_text(encoding="utf-8"))
    assert sorted(row["name"] for row in rows) == sorted(path.stem for path in WORKFLOWS)
    assert len({row["title"] for row in rows}) == len(rows)
    for row in rows:
        app = ["isApp"] if row["name"].endswith(".app") else []  # the template browser's filter of apps asks for it
        assert list(row) == ["name", "title", "description", "tags", "models", *app] and row["tags"], row
        assert len(row["title"]) <= 50 and 20 < len(row["description"]) <= 100 and "-" not in row["description"], row


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_each_file_that_is_loaded_is_offered_by_its_dialog_of_missing_models(workflow):
    for node in json.loads(workflow.read_text(encoding="utf-8"))["nodes"]:
        ours = ("AnyGPUComposePipeline", "AnyGPUUpscaleLatents", "AnyGPULoadMVAdapter")
        reads = node["type"] in ours or node["type"] not in (*NODES, "MarkdownNote")
        files = {value for value in node.get("widgets_values") or () if str(value).endswith(".safetensors") and reads}
        models = {model["name"]: model for model in node["properties"].get("models", ())}
        assert files == set(models), node["type"]
        for name, model in models.items():
            assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith(f"/{name}")
            assert "/resolve/main/" in model["url"] and model["directory"]


def test_each_family_has_a_template_of_single_files():
    rows = json.loads((WEB / "templates.json").read_text(encoding="utf-8"))
    assert sorted(row["models"][0] for row in rows if row["name"].endswith("_from_files")) == sorted(
        family.title for family in FAMILIES.values()
    )


def test_the_pictures_of_the_help_are_shown_and_small():
    """Each by the page it lies beside; that those which a page shows are there is a link like others."""
    pictures = sorted((WEB / "docs").rglob("*.webp"))
    assert pictures and not [*(WEB / "docs").rglob("*.png")], "run `make pictures`"
    for path in pictures:
        with Image.open(path) as picture:
            assert picture.format == "WEBP" and picture.width <= 900
        page = (path.parent / "en.md").read_text(encoding="utf-8")
        assert f"]({path.parent.name}/{path.name})" in page, f"{path.name} is shown nowhere"
    assert sum(path.stat().st_size for path in pictures) < MOST_PICTURES


@pytest.mark.parametrize("path", BLUEPRINTS, ids=lambda path: path.stem)
def test_a_blueprint_is_whole(path):
    """One node outside, whose definition has only our nodes and core's; every link and socket leads somewhere."""
    graph = json.loads(path.read_text(encoding="utf-8"))
    (definition,) = graph["definitions"]["subgraphs"]
    (outer,) = graph["nodes"]
    assert outer["type"] == definition["id"] and definition["name"] == path.stem == outer["title"]
    nodes: dict[int, Any] = {node["id"]: node for node in definition["nodes"]}
    assert all(node["type"] in {*NODES, "SaveVideo"} for node in nodes.values())
    for link in definition["links"]:
        origin, target = nodes.get(link["origin_id"]), nodes.get(link["target_id"])
        if origin is not None:
            assert link["id"] in (origin["outputs"][link["origin_slot"]]["links"] or [])
        if target is not None:
            taken = target["inputs"][link["target_slot"]]
            assert taken["link"] == link["id"]
            if target["type"] in NODES:
                assert taken["name"] in NODES[target["type"]][1]
    assert [entry["name"] for entry in definition["inputs"]] == [entry["name"] for entry in outer["inputs"]]
    assert [entry["name"] for entry in definition["outputs"]] == [entry["name"] for entry in outer["outputs"]]
    assert all(entry["linkIds"] for entry in (*definition["inputs"], *definition["outputs"]))


def test_a_blueprint_runs_any_family_but_framepack():
    assert [path.stem for path in BLUEPRINTS] == ["Any model to video"]


def translated(language: str) -> dict[str, Any]:
    """The node definitions of one language."""
    found: dict[str, Any] = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_and_input_is_translated_and_no_other(language):
    """Lists what is missing: names of nodes, then of inputs, and texts that are still empty."""
    found = translated(language)
    missing = [node_id for node_id in NODES if node_id not in found]
    for node_id, (_, inputs) in NODES.items():
        entries = found.get(node_id, {}).get("inputs", {})
        missing += [f"{node_id}.{name}" for name in inputs if not entries.get(name, {}).get("name")]
        missing += [f"{node_id}.{name} tooltip" for name in inputs if not entries.get(name, {}).get("tooltip")]
        missing += [
            f"{node_id} {key}" for key in ("display_name", "description") if not found.get(node_id, {}).get(key)
        ]
    assert not missing
    extra = [node_id for node_id in found if node_id not in NODES]
    extra += [f"{node}.{name}" for node in found for name in found[node]["inputs"] if name not in NODES[node][1]]
    assert not extra


def test_english_texts_are_those_of_a_node_and_an_input():
    texts = json.loads((ROOT / "nodes" / "tooltips.json").read_text(encoding="utf-8"))
    shared = texts.pop("shared")["inputs"].keys()
    assert not texts.keys() - NODES.keys() and not shared - {name for _, inputs in NODES.values() for name in inputs}
    assert not [f"{node}.{name}" for node in texts for name in texts[node]["inputs"] if name not in NODES[node][1]]


@pytest.mark.parametrize("language", LANGUAGES)
def test_translations_hold_nothing_the_frontend_would_take_for_a_place(language):
    """In its messages braces name a value, @ a link and | a plural, unless they are quoted as {'{'}."""
    text = json.dumps(translated(language), ensure_ascii=False)
    for value in re.findall(r'": "((?:[^"\\]|\\.)*)"', text):
        bare = re.sub(r"\{'[{}@|]'\}", "", value)
        assert not re.search(r"[{}@|]", bare), value


def test_languages_differ_from_one_another():
    texts = [json.dumps(translated(language), ensure_ascii=False) for language in LANGUAGES]
    assert len(set(texts)) == len(LANGUAGES)
    for language, letters in (("zh", "一-鿿"), ("ja", "ぁ-ヿ"), ("ko", "가-힣")):
        nodes = translated(language).values()
        tips = [entry["tooltip"] for node in nodes for entry in node["inputs"].values()]
        plain = [tip for tip in tips if not re.search(f"[{letters}]", tip)]
        assert not plain, f"{language}: {plain[:3]}"


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_files_that_belong_together_are_uploaded_into_a_folder_of_their_own():
    """Else a glTF would read the file beside an older upload of the same name."""
    source = (ROOT / "web" / "mesh_upload.js").read_text(encoding="utf-8")
    own = "\n".join(line for line in source.splitlines() if not line.startswith("import "))
    stands_in = """
    const folders = [];
    const api = { fetchApi: async (_, { body }) => {
      const [name, subfolder] = [body.get("image").name, body.get("subfolder")];
      folders.push(subfolder);
      return { status: 200, json: async () => ({ name, subfolder }) };
    } };
    const app = { registerExtension() {}, graph: { setDirtyCanvas() {} } };
    """
    talk = """
    const widget = { name: "mesh_file", options: { values: [] } };
    const file = (name) => new File(["x"], name);
    for (const names of [["scene.gltf"], ["scene.bin", "scene.gltf"]]) {
      await choose({ widgets: [widget] }, names.map(file));
      console.log(widget.value);
    }
    console.log(JSON.stringify(folders));
    """
    given = stands_in + own + talk
    ran = subprocess.run(["node", "--input-type=module"], input=given, capture_output=True, text=True, timeout=60)
    alone, together, folders = ran.stdout.splitlines()
    assert alone == "3d/scene.gltf", ran.stderr
    assert re.fullmatch(r"3d/\d+/scene\.gltf", together)
    assert json.loads(folders) == ["3d", *2 * [together.removesuffix("/scene.gltf")]]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_a_second_copy_of_the_pack_adds_no_name_twice():
    """ComfyUI lists the workflows of every folder, of a disabled one too; its search ends at a name given twice."""
    source = (WEB / "templates.js").read_text(encoding="utf-8")
    own = "\n".join(line for line in source.splitlines() if not line.startswith("import "))
    own = own.replace("import.meta.url", '"http://comfyui/extensions/anygpu/templates.js"')
    names = [path.stem for path in WORKFLOWS]
    stands_in = f"""
    const packs = {{ anygpu: {names}, "anygpu-main.disabled": {names}, another: ["theirs"] }};
    globalThis.fetch = async () => ({{ json: async () => {(WEB / "templates.json").read_text(encoding="utf-8")} }});
    const api = {{ getWorkflowTemplates: async () => packs, getCoreWorkflowTemplates: async () => [] }};
    const app = {{ registerExtension: (extension) => extension.init() }};
    """
    talk = """
    const left = Object.values(await api.getWorkflowTemplates()).flat();
    const shown = (await api.getCoreWorkflowTemplates("en")).flatMap(({ templates }) => templates);
    console.log(JSON.stringify([...left, ...shown.map(({ name }) => name)]));
    """
    given = stands_in + own + talk
    ran = subprocess.run(["node", "--input-type=module"], input=given, capture_output=True, text=True, timeout=60)
    assert sorted(json.loads(ran.stdout)) == sorted([*names, "theirs"]), ran.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_text_is_kept_from_a_workflow_that_did_not_queue_the_prompt():
    """As core dispatches it to its own listener, which is there first and paints the node with that id in any graph."""
    source = (WEB / "runs.js").read_text(encoding="utf-8")
    own = "\n".join(line for line in source.splitlines() if not line.startswith("import "))
    stands_in = """
    class Api extends EventTarget {
      async queuePrompt(number) { return { prompt_id: `run ${number}` }; }
      dispatchCustomEvent(kind, detail) { return this.dispatchEvent(new CustomEvent(kind, { detail })); }
    }
    const [first, second, painted] = [{ filename: "first" }, { filename: "second" }, []];
    const api = new Api();
    for (const kind of ["progress_text", "b_preview_with_metadata"]) {
      api.addEventListener(kind, ({ detail }) => painted.push(detail.text));
    }
    let extension;
    const extensionManager = { workflow: { activeWorkflow: first } };
    const app = { extensionManager, registerExtension: (made) => (extension = made) };
    """
    talk = """
    extension.init();
    const open = (workflow) => (extensionManager.workflow.activeWorkflow = workflow);
    const drawn = "b_preview_with_metadata";
    const preview = (nodeId, text) => api.dispatchCustomEvent(drawn, { nodeId, jobId: "run 1", text });
    const ours = (prompt, text) => {
      api.dispatchCustomEvent("anygpu.run", { prompt_id: prompt, node: "4", entry: { demo: [] } });
      api.dispatchCustomEvent("progress_text", { nodeId: "4", text });
    };
    const answer = api.queuePrompt(1);
    ours("run 1", "before its id is known");
    await answer;
    ours("run 1", "its own");
    api.dispatchCustomEvent("progress_text", { nodeId: "4", text: "of another pack" });
    extension.beforeConfigureGraph();
    ours("run 1", "NOT: the next graph is there, its workflow is not");
    open(second);
    extension.afterConfigureGraph();
    await new Promise((done) => setTimeout(done, SETTLED + 50));
    ours("run 1", "NOT: another workflow");
    preview("4", "NOT: a preview of another workflow");
    preview("5", "a preview of core's");
    api.dispatchCustomEvent("progress_text", { nodeId: "4", text: "of another pack again" });
    ours("run 0", "of a run before the page was loaded");
    open(first);
    extension.beforeConfigureGraph();
    ours("run 1", "NOT: perhaps another graph");
    extension.afterConfigureGraph();
    await new Promise((done) => setTimeout(done, SETTLED + 50));
    ours("run 1", "its own again");
    preview("4", "its own preview");
    extension.beforeConfigureGraph();
    extension.afterConfigureGraph();
    await api.queuePrompt(2);
    ours("run 2", "run as soon as it is opened");
    console.log(JSON.stringify(painted));
    """
    given = stands_in + own.replace("const SETTLED = 3000", "const SETTLED = 5") + talk
    ran = subprocess.run(["node", "--input-type=module"], input=given, capture_output=True, text=True, timeout=60)
    assert json.loads(ran.stdout or "null") == [
        "before its id is known",
        "its own",
        "of another pack",
        "a preview of core's",
        "of another pack again",
        "of a run before the page was loaded",
        "its own again",
        "its own preview",
        "run as soon as it is opened",
    ], ran.stderr
