"""deploy/docker/Dockerfile: what can be said of it without building it."""
import pathlib
import re
import unittest

import tools

DOCKERFILE = tools.ROOT / "deploy" / "docker" / "Dockerfile"
PROGRAMS = ["splice-router", "splice-prefill", "splice-decode", "splice-kvstore"]


def instructions():
    """(name, arguments) in order; continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def stages():
    """Name -> (base, instructions); the last stage may have no name."""
    found, current = {}, None
    for name, arguments in instructions():
        if name == "FROM":
            base, _, stage = arguments.partition(" AS ")
            current = found.setdefault(stage or "last", (base, []))[1]
        elif current is not None:
            current.append((name, arguments))
    return found


def resolved(stage):
    """All instructions of a stage and of the stages it is built from."""
    base, own = stages()[stage]
    return (resolved(base) if base in stages() else []) + own


class ImageTest(unittest.TestCase):
    def test_base_images_are_the_distributions_own(self):
        defaults = dict(a.split("=", 1) for n, a in instructions() if n == "ARG" and "_IMAGE" in a)
        self.assertEqual(set(defaults), {"BUILD_IMAGE", "RUNTIME_IMAGE"})
        for image in defaults.values():
            self.assertRegex(image, r"^debian:bookworm(-slim)?$")
        for base, _ in stages().values():
            self.assertTrue(base in stages() or base.strip("${}") in defaults, base)

    def test_nothing_runs_as_root(self):
        for stage in [*PROGRAMS, "splice", "last"]:
            users = [a for n, a in resolved(stage) if n == "USER"]
            self.assertRegex(users[-1], r"^[1-9]\d*:[1-9]\d*$", stage)
            self.assertFalse([a for n, a in resolved(stage) if n == "USER" and "root" in a])

    def test_the_chart_runs_the_images_user(self):
        user = [a for n, a in resolved("splice") if n == "USER"][-1].split(":")[0]
        helpers = (tools.ROOT / "deploy/helm/splice/templates/_helpers.tpl").read_text()
        self.assertIn(f"runAsUser: {user}\n", helpers)

    def test_every_program_has_a_target_and_is_in_the_bundle(self):
        bundle = (tools.ROOT / "deploy/bundle/make.sh").read_text()
        for program in PROGRAMS:
            self.assertEqual([a for n, a in resolved(program) if n == "ENTRYPOINT"], [f'["{program}"]'])
            self.assertIn(f'"$build"/bin/{program}', bundle)

    def test_the_final_image_holds_no_sources(self):
        copies = [a for n, a in resolved("splice") if n == "COPY"]
        self.assertEqual(copies, ["--from=build /out /opt/splice"])

    def test_what_it_copies_and_calls_exists(self):
        build = stages()["build"][1]
        self.assertIn(("COPY", "dev ./"), build)
        dev = (tools.ROOT / "dev").read_text()
        for command in re.findall(r"\./dev (\w+)", " ".join(a for _, a in build)):
            self.assertIn(f"cmd_{command}()", dev)
        ignored = pathlib.Path(str(DOCKERFILE) + ".dockerignore").read_text().split()
        for needed in ["deploy", "cmake", "services", "kernels", "proto", "tools", "tests"]:
            self.assertNotIn(needed, ignored)


if __name__ == "__main__":
    unittest.main()
