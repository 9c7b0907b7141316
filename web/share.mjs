// This machine as a small file: shown as it will be, then saved by the browser. Nothing is sent.
import { ask } from "./ask.mjs";
import { button, copyButton, make } from "./elements.mjs";

/** Save a text as a file where the browser saves them. */
function save(name, text) {
  const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

function preview({ text, file, form }) {
  const saved = make("p", { role: "status", class: "anygpu-why" });
  const onclick = () => {
    save(file, text);
    saved.textContent = `${file} is in your browser's downloads.`;
  };
  return make(
    "section",
    { class: "anygpu-share", "aria-label": "File to share" },
    make("p", {}, "This is the whole file. It has no paths, names, addresses or keys; look through it."),
    make("pre", { tabindex: 0, "aria-label": "The file" }, text),
    make("p", {}, button("Save the file", onclick), " ", copyButton(text)),
    saved,
    make("p", {}, "AnyGPU sends nothing. Paste it into the field Machine file of ", make("a", { href: form, target: "_blank", rel: "noreferrer" }, "this form"), " if you like."),
  );
}

/** A button that shows the file; it is written only by the button below it. */
export function shareMachine() {
  const body = make("div", { role: "status" });
  const share = button("Share this machine", async () => {
    share.disabled = true;
    body.replaceChildren(make("p", { class: "anygpu-why" }, "Asking the device takes a few seconds."));
    try {
      body.replaceChildren(preview(await ask("/share", {})));
    } catch (error) {
      body.replaceChildren(make("p", { class: "anygpu-bad" }, error.message));
    }
    share.disabled = false;
  });
  return make("div", {}, make("p", {}, share), body);
}
