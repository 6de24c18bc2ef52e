/* A page opened from a disk (file://) may start no worker, and the search is one. So run its script in a hidden frame. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.ready = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const inner = frame.contentWindow;
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inner.document.createElement("script");
          script.src = new URL(url, document.baseURI);
          script.addEventListener("load", () => resolve(inner));
          inner.document.body.append(script);
        }, { once: true });
      });
      document.body.append(frame);
    }
    postMessage(data) {
      this.ready.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
