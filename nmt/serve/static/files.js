// Files: upload with progress, translation with progress, download.

const $ = (id) => document.getElementById(id);
const POLL = 700; // milliseconds

function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");
}

function send(form, id, onUpload) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest(); // fetch reports no progress of an upload
    request.open("POST", "/translate_file");
    request.setRequestHeader("X-Request-ID", id);
    request.responseType = "json";
    request.upload.addEventListener("progress", (event) => onUpload(event.loaded / event.total));
    request.addEventListener("load", () => request.status === 200 ? resolve(request.response)
      : reject(new Error(request.response?.error ?? `the server answered ${request.status}`)));
    request.addEventListener("error", () => reject(new Error("the connection was lost")));
    request.send(form);
  });
}

export function setUpFiles({ settings, keyOf }) {
  const formats = settings.supportedFilesFormat;
  $("formats").textContent = `(${formats.join(", ")})`;
  $("file").accept = formats.join(",");
  $("file-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const form = new FormData(), id = randomId(), button = event.target.querySelector("[type=submit]");
    form.append("source", $("source").value);
    form.append("target", $("target").value);
    form.append("columns", $("columns").value);
    form.append("api_key", keyOf());
    form.append("file", $("file").files[0]);
    $("download").hidden = true;
    $("progress").hidden = false;
    $("progress").value = 0;
    button.disabled = true;
    $("file-state").textContent = "Uploading…";
    const poll = setInterval(async () => {
      const { done, total } = await fetch(`/v1/progress/${id}`).then((answer) => answer.json()).catch(() => ({}));
      if (total && button.disabled) { // not before it is read, nor after it is done
        $("progress").value = 0.1 + 0.9 * done / total;
        $("file-state").textContent = `${done} of ${total} sentences`;
      }
    }, POLL);
    try {
      const answer = await send(form, id, (share) => { $("progress").value = 0.1 * share; });
      const url = new URL(answer.translatedFileUrl);
      $("download").href = url.pathname; // the same place, whatever name the server knows itself by
      $("download").textContent = `Download ${decodeURIComponent(url.pathname.split("/").pop())}`;
      $("download").hidden = false;
      $("progress").value = 1;
      $("file-state").textContent = "Done.";
      $("download").focus();
    } catch (error) {
      $("file-state").textContent = error.message;
      $("progress").hidden = true;
    } finally {
      clearInterval(poll);
      button.disabled = false;
    }
  });
}
