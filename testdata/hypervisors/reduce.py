#!/usr/bin/env python3
"""Prints the part of an API description of a hypervisor that `quire bundle --vm` uses, as JSON.

usage: reduce.py DESCRIPTION.yaml SOURCE NAME... > FILE.json

SOURCE names the repository, the commit and the path of the description. Only the definitions NAME are kept, without
texts for humans. The test refuses a value whose definition is not kept.
"""

import json
import sys

import yaml


def main(file, source, *names):
    with open(file, encoding="utf-8") as text:
        whole = yaml.safe_load(text)
    definitions = whole.get("definitions") or whole["components"]["schemas"]
    kept = {name: reduced(definitions[name]) for name in names}
    json.dump({"source": source, "definitions": kept}, sys.stdout, indent=1, sort_keys=True)
    print()


def reduced(it):
    """Removes descriptions and defaults, and the path of references."""
    if isinstance(it, list):
        return [reduced(part) for part in it]
    if not isinstance(it, dict):
        return it
    # A field may be called `description` or `default`, but then its value is an object.
    texts = ("description", "default", "format")
    parts = {name: reduced(part) for name, part in it.items() if name not in texts or isinstance(part, dict)}
    if "$ref" in parts:
        parts["$ref"] = parts["$ref"].rsplit("/", 1)[1]
    return parts


main(*sys.argv[1:])
