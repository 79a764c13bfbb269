"""What the tests of deploy/ share: finding tools, and reading YAML strictly."""
import importlib
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART_TOOLS = ROOT / ".cache" / "charts" / "bin"  # made by ./dev charts
CHART_PYTHON = CHART_TOOLS / "python"
SKIPPED = 77


def skip(why):
    """Ends the test program; CTest calls that skipped."""
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


def need(*modules):
    """Goes on with an interpreter that has these modules, or skips the test program."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            if CHART_PYTHON.exists() and sys.prefix != str(CHART_PYTHON.parents[1]):
                os.execv(CHART_PYTHON, [str(CHART_PYTHON), *sys.argv])
            skip(f"the Python module {module} is not installed (./dev charts installs it)")


def load_documents(text):
    """All documents of a YAML text. ValueError: a key twice in a map, which plain loaders overlook."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def construct_map(loader, node):
        keys = [loader.construct_object(key) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise ValueError(f"a key twice {node.start_mark}: {sorted(k for k in keys if keys.count(k) > 1)}")
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct_map)
    return [document for document in yaml.load_all(text, Loader=Loader) if document is not None]
