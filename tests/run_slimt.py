"""Translate lines with slimt, in a process of its own, since slimt aborts the process on errors.

Reads a JSON object from stdin: `library`, the compiled module of slimt, and the names of the files
of a model, its sizes and the lines. Writes a JSON list of translations. The package of slimt is not
imported, since it downloads a list of models.
"""

from __future__ import annotations

import importlib.util
import json
import sys

task = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("_slimt", task["library"])
slimt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(slimt)
config = slimt.Config()
config.encoder_layers = task["num_encoder_layers"]
config.decoder_layers = task["num_decoder_layers"]
config.num_heads = task["num_heads"]
config.feed_forward_depth = 2
config.split_mode = "sentence"
package = slimt.Package(
    model=task["model"], vocabulary=task["vocabulary"], shortlist=task["shortlist"]
)
model = slimt.Model(config, package)
service = slimt.Service(workers=1, cache_size=0)
translations = []
for line in task["lines"]:  # one at a time: the candidates of a batch would be joined
    [response] = service.translate(model, [line])
    translations.append(response.target.text)
json.dump(translations, sys.stdout)
