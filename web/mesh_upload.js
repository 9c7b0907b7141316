// Adds a button to Load Mesh that uploads files to ComfyUI's folder input/3d and selects the mesh.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const NODE = "AnyGPULoadMesh";
const FOLDER = "3d";
const MESHES = [".glb", ".gltf", ".obj", ".ply", ".stl"];
const BESIDE = [".bin"]; // a glTF refers to it

/** Upload a file into a folder of ComfyUI's inputs; returns its name there. */
async function kept(file, folder) {
  const body = new FormData();
  body.append("image", file); // the route calls every file an image
  body.append("subfolder", folder);
  const answer = await api.fetchApi("/upload/image", { method: "POST", body });
  if (answer.status !== 200) throw new Error(`${file.name}: ${answer.status} ${answer.statusText}`);
  const { name, subfolder } = await answer.json();
  return `${subfolder}/${name}`;
}

/** Upload files, several into a folder of their own, as a glTF refers to files by name; select the first mesh. */
async function choose(node, files) {
  try {
    const names = [];
    const folder = files.length > 1 ? `${FOLDER}/${Date.now()}` : FOLDER;
    for (const file of files) names.push(await kept(file, folder));
    const mesh = names.find((name) => MESHES.some((kind) => name.toLowerCase().endsWith(kind)));
    const widget = node.widgets.find((each) => each.name === "mesh_file");
    if (!mesh) throw new Error(`no mesh in ${names.join(", ")}; expected one of ${MESHES.join(", ")}`);
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
      input.value = ""; // so that choosing the same file again counts as a change
    });
    const button = node.addWidget("button", "choose a mesh to upload", "", () => input.click(), { serialize: false });
    button.serialize = false;
  },
});
