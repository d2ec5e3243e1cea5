// Translate files: upload a file, show the progress, and offer the translation for download.

const POLL_MILLISECONDS = 700;
const UPLOAD_SHARE = 0.1; // part of the progress bar for the upload
const ID_BYTES = 12; // size of a random request id

const $ = (id) => document.getElementById(id);

function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(ID_BYTES));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Send a form and return the JSON of the answer. Calls `onUpload` with the uploaded share, 0 to 1.
function send(form, requestId, onUpload) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest(); // unlike `fetch`, reports the progress of an upload
    request.open("POST", "/translate_file");
    request.setRequestHeader("X-Request-ID", requestId);
    request.responseType = "json";
    request.upload.addEventListener("progress", (event) => onUpload(event.loaded / event.total));
    request.addEventListener("load", () => {
      const { status, response } = request;
      if (status === 200) resolve(response);
      else reject(new Error(response?.error ?? `the server answered ${status}`));
    });
    request.addEventListener("error", () => reject(new Error("the connection was lost")));
    request.send(form);
  });
}

function readForm(apiKey) {
  const form = new FormData();
  form.append("source", $("source").value);
  form.append("target", $("target").value);
  form.append("columns", $("columns").value);
  form.append("api_key", apiKey);
  form.append("file", $("file").files[0]);
  return form;
}

// Return the numbers of translated and of all sentences. They are undefined if the request fails.
async function fetchProgress(requestId) {
  try {
    const answer = await fetch(`/v1/progress/${requestId}`);
    return await answer.json();
  } catch {
    return {};
  }
}

function showDownload(address) {
  const { pathname } = new URL(address); // without the host, which the server may name differently
  const fileName = decodeURIComponent(pathname.split("/").pop());
  $("download").href = pathname;
  $("download").textContent = `Download ${fileName}`;
  $("download").hidden = false;
  $("download").focus();
}

async function translateFile(submitButton, apiKey) {
  const requestId = randomId();
  $("download").hidden = true;
  $("progress").hidden = false;
  $("progress").value = 0;
  $("file-state").textContent = "Uploading…";
  submitButton.disabled = true;
  const timer = setInterval(async () => {
    const { done, total } = await fetchProgress(requestId);
    const isTranslating = total && submitButton.disabled;
    if (!isTranslating) return;
    $("progress").value = UPLOAD_SHARE + (1 - UPLOAD_SHARE) * done / total;
    $("file-state").textContent = `${done} of ${total} sentences`;
  }, POLL_MILLISECONDS);
  try {
    const answer = await send(readForm(apiKey), requestId, (share) => {
      $("progress").value = UPLOAD_SHARE * share;
    });
    $("progress").value = 1;
    $("file-state").textContent = "Done.";
    showDownload(answer.translatedFileUrl);
  } catch (error) {
    $("file-state").textContent = error.message;
    $("progress").hidden = true;
  } finally {
    clearInterval(timer);
    submitButton.disabled = false;
  }
}

// Set up the form for files. `keyOf` returns the API key.
export function setUpFiles({ settings, keyOf }) {
  const formats = settings.supportedFilesFormat;
  $("formats").textContent = `(${formats.join(", ")})`;
  $("file").accept = formats.join(",");
  $("file-form").addEventListener("submit", (event) => {
    event.preventDefault();
    translateFile(event.target.querySelector("[type=submit]"), keyOf());
  });
}
