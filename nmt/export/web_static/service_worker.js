// Keeps all files of the page, so that it works without a network. A new version is fetched in the
// background, and is used after the last page of the old one is closed.
importScripts("files.js"); // VERSION and FILES, written by nmt-export

addEventListener("install", (event) => {
  const requests = FILES.map((file) => new Request(file, { cache: "reload" }));
  event.waitUntil(caches.open(cacheName()).then((cache) => cache.addAll(requests)));
});

addEventListener("activate", (event) => {
  event.waitUntil(deleteOldVersions().then(() => clients.claim()));
});

addEventListener("fetch", (event) => {
  event.respondWith(respond(event.request));
});

// The address is part of the name, since all pages of a site share their caches
function cachePrefix() { return `nmt ${registration.scope} `; }
function cacheName() { return cachePrefix() + VERSION; }

async function deleteOldVersions() {
  for (const name of await caches.keys()) {
    if (name.startsWith(cachePrefix()) && name !== cacheName()) await caches.delete(name);
  }
}

async function respond(request) {
  const cache = await caches.open(cacheName());
  return await cache.match(request, { ignoreSearch: true }) ?? fetch(request);
}
