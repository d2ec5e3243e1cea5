// Shows the OpenAPI description as a page.

function element(name, text, ...children) {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...children);
  return made;
}

const spec = await (await fetch("/spec")).json();

// Return a schema, or the one in the components that it refers to.
function resolve(schema) {
  return schema.$ref ? spec.components.schemas[schema.$ref.split("/").pop()] : schema;
}

function kind(reference) {
  const schema = resolve(reference);
  if (schema.oneOf) return schema.oneOf.map(kind).join(" or ");
  if (schema.type === "array") return `list of ${kind(schema.items)}`;
  return schema.enum ? schema.enum.join(" or ") : schema.type;
}

function parameters({ properties, required = [] }) {
  const table = document.createElement("table");
  for (const [name, reference] of Object.entries(properties)) {
    const schema = resolve(reference);
    const line = table.insertRow();
    line.insertCell().append(element("code", name), required.includes(name) ? " *" : "");
    line.insertCell().textContent = kind(schema);
    line.insertCell().textContent = schema.description ?? "";
    if (schema.properties) line.cells[2].append(parameters(schema));
  }
  return table;
}

for (const [path, methods] of Object.entries(spec.paths)) {
  for (const [method, route] of Object.entries(methods)) {
    const box = element("details", "", element("summary", `${method.toUpperCase()} ${path}: ${route.summary}`));
    if (route.description) box.append(element("p", route.description));
    const [[type, { schema }] = ["", {}]] = Object.entries(route.requestBody?.content ?? {});
    const types = Object.keys(route.requestBody?.content ?? {}).join(", ");
    if (schema?.properties) box.append(element("p", `Parameters (${types}; * is required)`), parameters(schema));
    const answers = Object.entries(route.responses).map(([status, answer]) => {
      const name = answer.$ref?.split("/").pop();
      return element("li", `${status}: ${(name ? spec.components.responses[name] : answer).description}`);
    });
    box.append(element("p", "Answers"), element("ul", "", ...answers));
    box.dataset.type = type;
    document.getElementById("routes").append(box);
  }
}
