#!/usr/bin/env python3
"""Renders the chart into deploy/manifests, for readers and for clusters without Helm.

  deploy/helm/render.py            writes the files
  deploy/helm/render.py --check    compares them with what the chart renders; exit status 1 when they differ

Needs the program helm (or SPLICE_HELM naming it), or the Python package helm-python-sdk, which is Helm as a library; and PyYAML.
"""
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
CHART = HERE / "splice"
MANIFESTS = HERE.parent / "manifests"
RELEASE = NAMESPACE = "splice"
# File -> values on top of the chart's own.
PROFILES = {"splice.yaml": None, "splice-gpu-rdma.yaml": HERE / "profiles" / "gpu-rdma.yaml",
            "splice-keda.yaml": HERE / "profiles" / "keda.yaml", "splice-hpa.yaml": HERE / "profiles" / "hpa.yaml"}
# What a manifest needs comes before it.
KINDS = ["NetworkPolicy", "PodDisruptionBudget", "ServiceAccount", "Role", "RoleBinding", "Secret", "ConfigMap", "Service", "StatefulSet",
         "Deployment", "HorizontalPodAutoscaler", "ScaledObject", "Ingress", "HTTPRoute", "PodMonitor", "PrometheusRule"]


class NoRenderer(Exception):
    """Neither helm nor helm-python-sdk is installed."""


class RenderError(Exception):
    """The chart refuses the values, or is broken; the message is Helm's."""


def _helm():
    wanted = os.environ.get("SPLICE_HELM")
    return wanted or shutil.which("helm")


def _render_with_program(helm, values_file, values):
    command = [helm, "template", RELEASE, str(CHART), "--namespace", NAMESPACE]
    if values_file is not None:
        command += ["--values", str(values_file)]
    import yaml
    done = subprocess.run(command + ["--values", "-"], input=yaml.safe_dump(values), capture_output=True, text=True)
    if done.returncode != 0:
        raise RenderError(done.stderr.strip())
    return [done.stdout]


def _render_with_library(values_file, values):
    try:
        import helm_python
    except ImportError:
        raise NoRenderer("install helm, or the Python package helm-python-sdk, to render the chart") from None
    import yaml
    merged = yaml.safe_load(values_file.read_text()) if values_file is not None else {}
    merge(merged, values)
    chart = helm_python.Chart.load(str(CHART))
    try:
        texts = chart.render(merged, name=RELEASE, namespace=NAMESPACE)
    except helm_python.HelmError as error:
        raise RenderError(str(error)) from None
    return [text for path, text in sorted(texts.items()) if path.endswith(".yaml")]


def merge(base, over):
    """Puts `over` into `base` as Helm merges values: maps by key, everything else replaced."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value


def render(values_file=None, values=None):
    """The chart's documents as texts, in the order of KINDS, then by name."""
    helm = _helm()
    values = values or {}
    texts = _render_with_program(helm, values_file, values) if helm else _render_with_library(values_file, values)
    documents = []
    for document in re.split(r"^---[^\n]*$", "\n---\n".join(texts), flags=re.MULTILINE):
        lines = [line.rstrip() for line in document.splitlines() if line.strip() and not line.startswith("# Source:")]
        if not any(line and not line.startswith("#") for line in lines):
            continue
        text = "\n".join(lines) + "\n"
        kind = re.search(r"^kind: (\w+)$", text, re.MULTILINE).group(1)
        name = re.search(r"^metadata:\n  name: (\S+)$", text, re.MULTILINE).group(1)
        documents.append(((KINDS.index(kind), name), text))
    return [text for _, text in sorted(documents)]


def digest():
    """A hash of everything that the manifests follow from: it tells a stale file where there is no Helm. Dashboards and alerts,
    which the chart links to, are in none of them."""
    hasher = hashlib.sha256()
    for path in sorted([*CHART.rglob("*"), *(HERE / "profiles").iterdir()]):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            hasher.update(f"{path.relative_to(HERE)} {len(content)}\n".encode() + content)
    return hasher.hexdigest()


def manifest(name):
    """The whole text of one file of deploy/manifests."""
    values_file = PROFILES[name]
    profile = f", values of {values_file.relative_to(HERE.parent.parent)}" if values_file is not None else ""
    head = f"# Rendered by deploy/helm/render.py from deploy/helm/splice{profile}; do not edit.\n# chart-digest: {digest()}\n"
    return head + "".join("---\n" + text for text in render(values_file))


def main():
    try:
        texts = {name: manifest(name) for name in PROFILES}
    except (NoRenderer, RenderError) as error:
        sys.exit(f"render.py: {error}")
    if "--check" in sys.argv[1:]:
        stale = [name for name, text in texts.items() if (MANIFESTS / name).read_text() != text]
        sys.exit(f"deploy/manifests is stale ({', '.join(stale)}): run deploy/helm/render.py" if stale else 0)
    MANIFESTS.mkdir(exist_ok=True)
    for name, text in texts.items():
        (MANIFESTS / name).write_text(text)
        print(f"{MANIFESTS / name}: {text.count(chr(10) + '---')} documents")


if __name__ == "__main__":
    main()
