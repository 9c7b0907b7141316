// On Load Mesh: a button that puts files of the user's into ComfyUI's folder input/3d and chooses the mesh among them.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const NODE = "AnyGPULoadMesh";
const FOLDER = "3d";
const LABEL = "choose a mesh to upload";
const MESHES = [".glb", ".gltf", ".obj", ".ply", ".stl"];
const BESIDE = [".bin"]; // what a glTF file reads beside itself

/** The name that a file has among ComfyUI's inputs, in a folder of them. */
async function kept(file, folder) {
  const body = new FormData();
  body.append("image", file); // the route's name for any file
  body.append("subfolder", folder);
  const answer = await api.fetchApi("/upload/image", { method: "POST", body });
  if (answer.status !== 200) throw new Error(`${file.name}: ${answer.status} ${answer.statusText}`);
  const { name, subfolder } = await answer.json();
  return subfolder ? `${subfolder}/${name}` : name;
}

/** Keep the files, and choose the first mesh among them.
 *
 * Several get a folder of their own: ComfyUI renames a file whose name is taken, and a glTF names the file beside it.
 */
async function choose(node, files) {
  try {
    const names = [];
    const folder = files.length > 1 ? `${FOLDER}/${Date.now()}` : FOLDER;
    for (const file of files) names.push(await kept(file, folder));
    const mesh = names.find((name) => MESHES.some((kind) => name.toLowerCase().endsWith(kind)));
    const widget = node.widgets.find((each) => each.name === "mesh_file");
    if (!mesh) throw new Error(`no mesh among ${names.join(", ")}; expected one of ${MESHES.join(", ")}`);
    if (!widget.options.values.includes(mesh)) widget.options.values = [...widget.options.values, mesh];
    widget.value = mesh;
    widget.callback?.(mesh);
    app.graph.setDirtyCanvas(true, true);
  } catch (error) {
    app.extensionManager.toast.add({ severity: "error", summary: "AnyGPU Load Mesh", detail: error.message });
  }
}

app.registerExtension({
  name: "anygpu.mesh_upload",
  nodeCreated(node) {
    if ((node.comfyClass ?? node.type) !== NODE) return;
    const input = Object.assign(document.createElement("input"), { type: "file", multiple: true });
    input.accept = [...MESHES, ...BESIDE].join(",");
    input.addEventListener("change", async () => {
      await choose(node, [...input.files]);
      input.value = ""; // the same file again is a change again
    });
    const button = node.addWidget("button", LABEL, "", () => input.click(), { serialize: false });
    button.serialize = false;
  },
});
