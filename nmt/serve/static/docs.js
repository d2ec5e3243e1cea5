// Show the OpenAPI description of the server as a page.

function createElement(name, text, ...children) {
  const element = document.createElement(name);
  element.textContent = text;
  element.append(...children);
  return element;
}

const spec = await (await fetch("/spec")).json();

// Return a schema, or the component that it refers to.
function resolve(schema) {
  if (!schema.$ref) return schema;
  return spec.components.schemas[schema.$ref.split("/").pop()];
}

// Return the type of a schema in words.
function typeName(reference) {
  const schema = resolve(reference);
  if (schema.oneOf) return schema.oneOf.map(typeName).join(" or ");
  if (schema.type === "array") return `list of ${typeName(schema.items)}`;
  if (schema.enum) return schema.enum.join(" or ");
  return schema.type;
}

function createParameterTable({ properties, required = [] }) {
  const table = document.createElement("table");
  for (const [name, reference] of Object.entries(properties)) {
    const schema = resolve(reference);
    const row = table.insertRow();
    const mark = required.includes(name) ? " *" : "";
    row.insertCell().append(createElement("code", name), mark);
    row.insertCell().textContent = typeName(schema);
    const description = row.insertCell();
    description.textContent = schema.description ?? "";
    if (schema.properties) description.append(createParameterTable(schema));
  }
  return table;
}

function createResponseList(responses) {
  const list = document.createElement("ul");
  for (const [status, response] of Object.entries(responses)) {
    const name = response.$ref?.split("/").pop();
    const { description } = name ? spec.components.responses[name] : response;
    list.append(createElement("li", `${status}: ${description}`));
  }
  return list;
}

function createRoute(path, method, route) {
  const summary = createElement("summary", `${method.toUpperCase()} ${path}: ${route.summary}`);
  const box = createElement("details", "", summary);
  if (route.description) box.append(createElement("p", route.description));
  const content = route.requestBody?.content ?? {};
  const types = Object.keys(content);
  const schema = content[types[0]]?.schema; // equal for all media types
  if (schema?.properties) {
    box.append(createElement("p", `Parameters (${types.join(", ")}; * is required)`));
    box.append(createParameterTable(schema));
  }
  box.append(createElement("p", "Answers"), createResponseList(route.responses));
  box.dataset.type = types[0] ?? "";
  return box;
}

for (const [path, methods] of Object.entries(spec.paths)) {
  for (const [method, route] of Object.entries(methods)) {
    document.getElementById("routes").append(createRoute(path, method, route));
  }
}
