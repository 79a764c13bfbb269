#!/usr/bin/env python3
"""Breaks the product on purpose, one mistake at a time, and runs the tests that must notice.

    ./dev mutants                 all of them
    ./dev mutants one-head        those whose name contains this
    tests/mutants/mutants.py --check   only whether each one still finds its place in the sources; takes no build

A mutant that its tests do not notice is an error: a test lost its teeth. So is one that does not find its place or does
not compile: then change it together with the code. The sources are copied to build-mutants/tree and built there; the
working tree stays as it is."""

import argparse
import dataclasses
import filecmp
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TREE = ROOT / "build-mutants" / "tree"


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    mistake: str
    file: str
    old: str  # stands in the file once
    new: str
    test: str  # must fail


RUN = "services/engine/runtime/prompt_run.cc"
SCORING = "services/engine/execution/observers/column_scoring.cc"
SPARSEX = "services/engine/recovery/sparsex.cc"
PROBE = "services/engine/recovery/sparsex_probe.cc"
SPLICE = "services/engine/recovery/splice.cc"
CONTEXT = "services/engine/cache/copy_context.cc"
RESTORE = "services/engine/recovery/edge_restore.cc"
HARVEST = "services/engine/runtime/prompt_harvest.cc"

# Where a mistake is planted, what stands there, and what takes its place.
TO_POSITIONS = "  ToPositions(indices, request.candidates);\n"
MIRRORED = (RUN, TO_POSITIONS,
            "  for (int32_t& i : indices) i = static_cast<int32_t>(CountOf(request.candidates)) - 1 - i;\n"
            "  std::reverse(indices.begin(), indices.end());\n" + TO_POSITIONS)

MUTANTS = [
    Mutant("mirrored-choice", "the mirror image of the chosen tokens is recomputed", *MIRRORED, "engine_chosen_rows_test"),
    Mutant("mirrored-choice-answers", "the same: whole answers are wrong then", *MIRRORED, "evals_methods_gate_test"),
    Mutant("forgotten-gaps", "gaps between candidates are forgotten", "services/engine/model/position_ranges.cc",
           "numbers[next] += range.begin - before;", "numbers[next] += ranges.front().begin;",
           "engine_chosen_rows_test"),
    Mutant("first-row-asks", "only the first row of a pass asks", SCORING,
           "if (ContainsPosition(options_.probes, positions[i]))", "if (i == 0)", "engine_chosen_rows_test"),
    Mutant("all-rows-ask", "copied rows of the pass ask, too", SPARSEX,
           "return UnionOf(layout.fresh(), Tail(layout));", "return {layout.active()};", "engine_chosen_rows_test"),
    Mutant("one-head-scores", "one KV head scores", SCORING,
           "  args.kv_heads = heads_;\n", "  constexpr int32_t kOne = 0;\n  args.kv_heads = {&kOne, 1};\n",
           "engine_chosen_rows_test"),
    Mutant("layer-below-scores", "the layer below the last dense one scores", SPARSEX,
           "const int32_t layer = std::max(0, dense_layers_ - 1);", "const int32_t layer = std::max(0, dense_layers_ - 2);",
           "engine_chosen_rows_test"),
    Mutant("no-neighbours", "a score does not count for its neighbours", SPARSEX,
           ".pool_radius = options_.score_pool,", ".pool_radius = 0,", "engine_chosen_rows_test"),
    Mutant("no-edges", "text beside fresh text is not recomputed", SPARSEX,
           "for (const PositionRanges& more : {Overflow(layout), Tail(layout), Links(layout)})",
           "for (const PositionRanges& more : {Tail(layout), Links(layout)})", "engine_chosen_rows_test"),
    Mutant("probe-scores-below", "a layer of the probe scores that must not", PROBE,
           "Scores(layout, end_ - scoring_, scoring_, chosen_)", "Scores(layout, 0, end_, chosen_)",
           "engine_chosen_rows_test"),
    Mutant("probe-scores-once", "only the first of the probe's scoring layers scores", SPARSEX,
           ".all_layers = num_layers > 1};", ".all_layers = false};", "engine_chosen_rows_test"),
    Mutant("probe-runs-copies", "copied rows run through the probe, too", PROBE,
           ".rows = score.probes,", ".rows = {layout.active()},", "engine_chosen_rows_test"),
    Mutant("turned-by-slots", "rows of a probe that does not see all are turned by their slots",
           "services/engine/runtime/seen_pages.cc", "slice.angles = slice.positions;", "slice.angles = {};",
           "engine_unseen_text_test"),
    Mutant("candidates-by-text", "the columns of such a probe are those of the text", RUN,
           ".candidates = seen(request.candidates),", ".candidates = request.candidates,", "engine_unseen_text_test"),
    Mutant("probe-without-its-share", "a run of fresh text is left out whole where a part of it asks", PROBE,
           "std::min<int64_t>(range.size(), in_front));", "range.size());", "engine_unseen_text_test"),
    Mutant("probe-goes-on", "rows behind a probe begin above it", PROBE,
           ".layers = {0, config().num_layers}};",
           ".layers = {options().probe_layers - 1, config().num_layers}};", "engine_segments_test"),
    Mutant("probe-whatever-it-costs", "a probe where dense layers cost less", PROBE,
           "|| CostOf(layout) < static_cast<double>(SparseXPolicy::CostOf(layout));", "|| true;",
           "engine_segments_test"),
    Mutant("probe-for-its-rows", "a probe costs its rows alone", PROBE,
           "return kProbeRowCost * static_cast<double>(rows);", "return static_cast<double>(rows);",
           "engine_segments_test"),
    Mutant("probe-by-class", "local heads of splice's probe see their window", SPLICE,
           "if (!uses_classes(reuses_) || is_probing())", "if (!uses_classes(reuses_))", "engine_chosen_rows_test"),
    Mutant("documents-by-class", "local heads of splice see their window in front of the question, too", SPLICE,
           "if (!question_.has_value()) return plan;", "return plan;", "engine_head_class_policies_test"),
    Mutant("first-layers-heads", "the global heads of one layer score all layers of a probe", SPLICE,
           "plan_.GlobalHeads(score.layer + i)", "plan_.GlobalHeads(score.layer)", "engine_chosen_rows_test"),
    Mutant("probe-over-parts", "a probe over copies that lack its first layers", PROBE,
           " || !layout.copies_are_whole) return;", ") return;", "engine_quantized_copies_test"),
    Mutant("positions-decide", "a copy at the right position passes for one in the same context", CONTEXT,
           "return hash == context.front ? CopyContext::kSame : other;",
           "return hash == context.front || own >= 0 ? CopyContext::kSame : other;",
           "engine_copy_context_test"),
    Mutant("lead-unlimited", "any number of other tokens in front is the same context", CONTEXT,
           "std::max(seen, here) <= kLeadTokensMax &&", "seen >= 0 &&", "engine_copy_context_test"),
    Mutant("same-is-recovered", "copies in the same context are recovered", SPARSEX,
           "if (!IsSame(layout.contexts[i])) recovered", "recovered", "engine_copy_context_test"),
    Mutant("foreign-stays", "nothing takes the place of a copy that has seen other text", HARVEST,
           ".replaces = foreign}", ".replaces = false}", "engine_copied_tokens_test"),
    Mutant("context-not-stored", "the store does not say behind which text", "services/engine/cache/segment_io.cc",
           "                  .context = source.context().front};", "                  .context = {}};",
           "engine_copied_tokens_test"),
    Mutant("next-head-restored", "the neighbour of the head that looks away is restored", RESTORE,
           "heads.push_back(static_cast<int32_t>(h));",
           "heads.push_back(static_cast<int32_t>((h + 1) % edge_mass.size()));", "engine_planted_needle_test"),
    Mutant("every-head-restored", "heads are restored whatever they see", RESTORE,
           "if (edge_mass[h] > thresholds[h])", "if (edge_mass[h] >= 0 && thresholds[h] >= 0)",
           "engine_planted_needle_test"),
    Mutant("least-query-counts", "the query head that looks away least decides", RESTORE,
           "most = std::max(most, static_cast<float>(sum / probes.num_probes));",
           "most = h % group == 0 ? static_cast<float>(sum / probes.num_probes)\n"
           "                         : std::min(most, static_cast<float>(sum / probes.num_probes));",
           "engine_planted_needle_test"),
    Mutant("scale-stays", "rows of FP8 are copied without their scales", "kernels/common/kv_rows.h",
           "  if (dtype != DType::kE4M3) return;\n  const size_t scales",
           "  if (dtype != DType::kInt4) return;\n  const size_t scales", "align_copy_test"),
    Mutant("fused-scale-stays", "a row of FP8 is saved for fusion without its scale", "kernels/kv_copy/fuse_rows.cc",
           "    if (dtype == DType::kE4M3) scale(row) = KvRowScale(head_dim, half, slot);\n", "", "fuse_rows_test"),
    Mutant("edited-history", "a conversation's pages are taken for an edited history", "services/engine/cache/session_table.cc",
           "const auto equal = std::mismatch(blocks.begin(), blocks.end(), session.blocks.begin(), session.blocks.end()).first;",
           "const auto equal = blocks.begin() + static_cast<int64_t>(std::min(blocks.size(), session.blocks.size()));",
           "conversations_test"),
    Mutant("kept-never-gives-way", "reservations cannot take kept pages", "services/decode/reservation.cc",
           "return shared.MakeRoom(needed);", "return shared.pool().HasFree(needed);", "conversations_test"),
    Mutant("prefixes-never-give-way", "a shared prefix is no cache of the pool", "services/engine/cache/prefix_index.cc",
           "    pool_.MarkCached(it->second.pages);\n", "", "local_prefill_test"),
    Mutant("conversations-go-first", "prefixes outlive conversations", "services/engine/runtime/page_budget.cc",
           "    if (kept_.prefixes.EvictUntilFree(num_pages)) break;\n    if (reclaim_ && reclaim_()) continue;\n",
           "    if (reclaim_ && reclaim_()) continue;\n    if (kept_.prefixes.EvictUntilFree(num_pages)) break;\n",
           "local_prefill_test"),
    Mutant("approximate-turns-hold", "turns of every method hold pages", "services/decode/conversation.cc",
           "methods::ResolvePolicy(policy, false, \"\") != methods::kExact", "policy == \"none\"", "conversations_test"),
    Mutant("h2o-counts-no-steps", "attention of decode steps is not added", "kernels/selection/h2o/heavy_hitters.cc",
           " + paid[at];", ";", "selection_test"),
    Mutant("h2o-forgets-the-prompt", "steps begin with no attention of the prompt's rows",
           "services/engine/selection/kept_positions.cc", "std::bit_cast<int32_t>(attention[stream][i])",
           "std::bit_cast<int32_t>(0 * attention[stream][i])",
           "engine_decode_selection_test"),
    Mutant("cascade-of-old-keys", "compact keys stay when other tokens are kept", "services/engine/selection/cascade.cc",
           "inner.compact_len = outer.refresh ? 0 : kept;", "inner.compact_len = kept;", "engine_decode_selection_test"),
]


def misplaced():
    """What keeps mutants from being planted, as lines."""
    names = set()
    for mutant in MUTANTS:
        count = (ROOT / mutant.file).read_text().count(mutant.old)
        if count != 1:
            yield f"{mutant.name}: its text stands {count} times in {mutant.file}, not once: change the mutant with the code"
        if mutant.name in names:
            yield f"{mutant.name}: two mutants have this name"
        names.add(mutant.name)


def copy_sources():
    """Brings TREE up to date. Files that did not change keep their times, so that little is built."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout
    wanted = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in wanted:
        source, target = ROOT / name, TREE / name
        if target.exists() and filecmp.cmp(source, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    for folder in ("kernels", "services", "proto", "tests"):
        for path in (TREE / folder).rglob("*"):
            if path.is_file() and str(path.relative_to(TREE)) not in wanted:
                path.unlink()
    cache = ROOT / ".cache" / "xgrammar"
    if cache.exists() and not (TREE / ".cache" / "xgrammar").exists():
        shutil.copytree(cache, TREE / ".cache" / "xgrammar")


def run(command, log):
    with open(log, "w") as out:
        return subprocess.run(command, cwd=TREE, stdout=out, stderr=subprocess.STDOUT).returncode == 0


def build(targets, log):
    return run(["ninja", "-C", "build", "-j", str(os.cpu_count()), *sorted(targets)], log)


def passes(test, log):
    return run(["ctest", "--test-dir", "build", "-R", f"^{test}$", "--output-on-failure", "--no-tests=error"], log)


def try_mutant(mutant, log):
    """None: the test noticed it. Otherwise why not."""
    file = TREE / mutant.file
    original = file.read_text()
    try:
        file.write_text(original.replace(mutant.old, mutant.new))
        if not build({mutant.test}, log):
            return f"does not compile, see {log}"
        return f"SURVIVED {mutant.test}" if passes(mutant.test, log) else None
    finally:
        file.write_text(original)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="only mutants whose name contains this")
    parser.add_argument("--check", action="store_true", help="only whether each finds its place in the sources")
    flags = parser.parse_args()
    problems = list(misplaced())
    if flags.check or problems:
        print("\n".join(problems) or f"{len(MUTANTS)} mutants find their places")
        return 1 if problems else 0
    chosen = [mutant for mutant in MUTANTS if flags.part in mutant.name]
    if not chosen:
        print(f"no mutant's name contains '{flags.part}'; there are: {', '.join(m.name for m in MUTANTS)}")
        return 2
    copy_sources()
    logs = TREE.parent
    tests = {mutant.test for mutant in chosen}
    if not (TREE / "build" / "build.ninja").exists():
        if not run(["cmake", "--preset", "release"], logs / "configure.log"):
            print(f"cannot configure, see {logs / 'configure.log'}")
            return 1
    if not build(tests, logs / "build.log"):
        print(f"cannot build, see {logs / 'build.log'}")
        return 1
    for test in sorted(tests):
        if not passes(test, logs / "test.log"):
            print(f"{test} fails without a mutant, see {logs / 'test.log'}")
            return 1
    failures = 0
    for mutant in chosen:
        start = time.monotonic()
        why = try_mutant(mutant, logs / f"{mutant.name}.log")
        failures += why is not None
        print(f"{mutant.name:22} {why or 'noticed by ' + mutant.test:44} {time.monotonic() - start:4.0f} s   {mutant.mistake}",
              flush=True)
    print(f"{len(chosen) - failures} of {len(chosen)} mutants were noticed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
