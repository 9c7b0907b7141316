// The side bar tab. Code, style and data are fetched only when it is opened.
import { app } from "../../scripts/app.js";

let tab = null; // while it is open

app.registerExtension({
  name: "anygpu.panel",
  afterConfigureGraph: () => tab?.later(), // another workflow, or the same one restored
  setup() {
    app.extensionManager.registerSidebarTab({
      id: "anygpu",
      icon: "pi pi-microchip",
      title: "AnyGPU",
      tooltip: "AnyGPU: choices for this machine, memory forecast, last run",
      type: "custom",
      render: async (element) => {
        const { open } = await import("./panel.mjs");
        tab?.close();
        tab = element.isConnected ? open(element) : null; // closed meanwhile
      },
      destroy: () => {
        tab?.close();
        tab = null;
      },
    });
  },
});
