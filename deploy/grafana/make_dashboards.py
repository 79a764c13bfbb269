#!/usr/bin/env python3
"""Writes the dashboards beside this file: they are made here, so that a change of a metric is a change of one line.

  deploy/grafana/make_dashboards.py            writes the files
  deploy/grafana/make_dashboards.py --check    exit status 1 when they are not what this program writes

Series are expected as deploy/prometheus/prometheus.yml scrapes them: with labels namespace, release, component and pod.
"""
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
SELECTOR = 'namespace=~"$namespace", release=~"$release"'
COLUMNS, HEIGHT = 24, 8


def series(name, **labels):
    """A selector of the dashboard's cluster; a label's value is a regular expression."""
    more = "".join(f', {label}=~"{value}"' for label, value in labels.items())
    return f"{name}{{{SELECTOR}{more}}}"


def rate(name, **labels):
    return f"rate({series(name, **labels)}[$__rate_interval])"


def total(name, by="", **labels):
    return f"sum{f' by ({by})' if by else ''} ({rate(name, **labels)})"


def share(part, whole):
    return f"{part} / {whole}"


def quantile(q, name, by="", **labels):
    groups = ", ".join(filter(None, ["le", by]))
    return f"histogram_quantile({q}, sum by ({groups}) ({rate(name + '_bucket', **labels)}))"


def quantiles(name, **labels):
    """Three lines: half, nineteen of twenty, ninety-nine of a hundred."""
    return [(quantile(q, name, **labels), f"p{int(q * 100)}") for q in (0.5, 0.95, 0.99)]


def panel(title, unit, lines, description="", kind="timeseries", stack=False, width=8):
    return {"title": title, "unit": unit, "lines": lines, "description": description, "kind": kind, "stack": stack,
            "width": width}


def overview():
    return [
        panel("Requests finished", "reqps", [(total("splice_request_success_total", "finished_reason"), "{{finished_reason}}"),
                                             (total("splice_request_errors_total", "code"), "{{code}}")],
              "By how they ended; errors by status code.", stack=True),
        panel("Time to first token", "s", quantiles("splice_time_to_first_token_seconds"), "What a client waits."),
        panel("Between two tokens", "s", quantiles("splice_inter_token_latency_seconds")),
        panel("Whole requests", "s", quantiles("splice_e2e_request_latency_seconds")),
        panel("Where the first token's time goes (p95)", "s",
              [(quantile(0.95, "splice_ttft_stage_seconds", "stage", component="prefill"), "{{stage}}"),
               (quantile(0.95, "splice_ttft_stage_seconds", component="router", stage="queue"), "router queue")],
              "Each stage's own p95: they do not add up to the p95 of the whole."),
        panel("The first token's time by stage", "s",
              [(share(total("splice_router_ttft_stage_seconds_sum", "stage"),
                      "on () group_left " + total("splice_time_to_first_token_seconds_count")), "{{stage}}")],
              "Means, stacked: they add up to the mean time to the first token.", stack=True),
        panel("Tokens", "short", [(total("splice_prompt_tokens_total", component="router"), "prompt"),
                                  (total("splice_generation_tokens_total", component="router"), "generated")], "Per second."),
        panel("Waiting and running at the routers", "short", [(f"sum ({series('splice_router_queue_depth')})", "waiting"),
                                               (f"sum ({series('splice_num_requests_running', component='router')})", "running")]),
        panel("Spans of traces", "short", [(total("splice_trace_spans_total", "result"), "{{result}}")],
              "Per second; queue_full and not_sent are lost."),
        panel("Refused, cancelled, started over", "reqps", [(total("splice_admission_rejection_total"), "refused: queue full (429)"),
                                                  (total("splice_rate_limited_total"), "refused: limit of the key (429)"),
                                                  (total("splice_router_api_keys_reloads_total", "result"), "file of API keys read again: {{result}}"),
                                                  (total("splice_router_public_tls_reloads_total", "result"), "certificate of the APIs read again: {{result}}"),
                                                  (total("splice_model_cancellation_total"), "client left or deadline"),
                                                  (total("splice_router_retries_total"), "tried again"),
                                                  (total("splice_model_migration_total"), "moved midway")]),
        panel("Kept responses", "short", [(f"sum ({series('splice_router_stored_responses')})", "kept"),
                                          (total("splice_router_stored_responses_missed_total"), "asked for and not kept, per second")],
              "Of /v1/responses: what previous_response_id may name."),
        panel("Memory of kept responses", "bytes", [(f"sum ({series('splice_router_stored_response_bytes')})", "all routers")]),
        panel("TLS of the APIs", "short", [(total("splice_router_public_tls_handshakes_total", "result"), "connections: {{result}}"),
                                           (f"(min ({series('splice_router_public_tls_valid_until_seconds')} > 0) - time()) / 86400",
                                            "days until the certificate expires")],
              "HTTPS connections per second by how they began; gRPC counts none."),
        panel("Workers in use", "short", [(f"min by (worker_type) ({series('splice_router_workers')})", "{{worker_type}}"),
                                          (f"min by (worker_type) ({series('splice_router_members')})",
                                           "{{worker_type}} in the list"),
                                          (f"sum ({series('splice_router_breakers_open')})", "left alone")],
              "As the router that sees fewest has it."),
        panel("Workers wanted", "short", [(f"max by (pool) ({series('splice_pool_desired_replicas')})", "{{pool}}"),
                                          (f"max by (pool, reason) ({series('splice_pool_desired_reason')}) == 1", "{{pool}}: {{reason}}")],
              "What the planner says, and why."),
    ]


def pools():
    return [
        panel("KV pool", "percentunit", [(f"max by (component, pod) ({series('splice_kv_cache_usage_perc')})", "{{pod}}")],
              "Prefill workers keep prefixes until somebody needs the room: near 1 is their healthy state. Decode workers end their "
              "youngest sequence at 1."),
        panel("Sequences being decoded", "short", [(f"sum by (pod) ({series('splice_num_requests_running', component='decode')})", "{{pod}}")]),
        panel("Prompts waiting or being computed", "short",
              [(f"sum by (pod) ({series('splice_num_requests_waiting', component='prefill')})", "{{pod}}")]),
        panel("Prompt tokens by worker", "short", [(total("splice_prompt_tokens_total", "pod", component="prefill"), "{{pod}}")],
              "Per second. Uneven lines: prompts with a common prefix go where it is."),
        panel("Where prompts are computed", "short",
              [(total("splice_router_prefills_total", "place"), "{{place}}"),
               (f"max ({series('splice_router_local_prefill_workers')})", "decode workers that take short ones")],
              "Prefills started per second: in the prefill pool, or on the decode worker itself.", stack=False),
        panel("Short prompts on decode workers", "short",
              [(f"sum by (pod) ({series('splice_decode_local_prefill_waiting')})", "{{pod}}, waiting or computed"),
               (f"sum by (pod) ({series('splice_decode_cached_pages')})", "{{pod}}, cached pages")]),
        panel("Tokens decoded by worker", "short", [(total("splice_generation_tokens_total", "pod", component="decode"), "{{pod}}")], "Per second."),
        panel("Tokens of a pass of the model", "short",
              [(quantile(0.5, "splice_pass_tokens", "work"), "{{work}}, median"),
               (quantile(0.95, "splice_pass_tokens", "work"), "{{work}}, p95")],
              "Passes of few tokens read all weights for little; both: a decode step that shared a pass of prompts."),
        panel("Sequences that gave way for want of pages", "short",
              [(total("splice_num_preemptions_total", "pod"), "{{pod}}, per second"),
               (f"sum by (pod) ({series('splice_decode_parked_sequences')})", "{{pod}}, waiting"),
               (total("splice_decode_dense_fallbacks_total", "pod"), "{{pod}}, decoded densely for want of room, per second")]),
        panel("KV in host memory", "bytes",
              [(f"sum by (pod) ({series('splice_decode_parked_bytes')})", "{{pod}}, of sequences that gave way"),
               (f"sum by (pod) ({series('splice_decode_host_kv_bytes')})", "{{pod}}, host tier")]),
        panel("Listed rows in host memory", "short",
              [(total("splice_decode_host_rows_total", "rows"), "{{rows}}")],
              "Per second, counted when a sequence ends. Copied ones came over the link while their layer waited."),
        panel("Workers lost", "short", [(total("splice_router_workers_lost_total", "reason"), "{{reason}}"),
                                        (total("splice_router_breaker_opened_total"), "left alone"),
                                        (total("splice_router_poisoned_requests_total"), "requests that killed two"),
                                        (total("splice_router_retry_budget_exhausted_total"), "no retry left")]),
        panel("Silence before a worker is lost", "s", quantiles("splice_router_worker_silence_seconds"),
              "Its requests wait that long for nothing."),
        panel("Caches as the routers know them", "short",
              [(f"max ({series('splice_router_cache_view_chunks')})", "chunks"),
               (total("splice_router_cache_resyncs_total"), "read anew, per second")]),
        panel("Choosing workers", "s", quantiles("splice_router_decision_seconds")),
        panel("Prompt lengths", "short", quantiles("splice_request_prompt_tokens"), "Tokens."),
        panel("Waiting on decode workers", "short", [(f"sum by (pod) ({series('splice_num_requests_waiting', component='decode')})", "{{pod}}")],
              "Reserved, or waiting for a place in the batch."),
    ]


def reuse():
    everything = total("splice_reuse_tokens_total", component="prefill")
    return [
        panel("Prompt tokens by where their KV came from", "percentunit",
              [(share(total("splice_reuse_tokens_total", "kind", component="prefill"),
                      f"on () group_left () {everything}"), "{{kind}}")], "Shares of all prompt tokens.", stack=True),
        panel("Tokens of segments computed afresh", "percentunit",
              [(share(total("splice_recomputed_tokens_total"), total("splice_reuse_tokens_total", kind="segment", component="prefill")),
                "recomputed")], "Of the tokens reused at another position."),
        panel("Copied tokens by what they have seen", "percentunit",
              [(share(total("splice_copied_tokens_total", "context"),
                      f"on () group_left () {total('splice_copied_tokens_total')}"), "{{context}}")],
              "The same text as here, nothing but their segment, or other text.", stack=True),
        panel("Sessions", "short", [(f"sum ({series('splice_prefill_sessions')})", "kept"),
                                    (total("splice_prefill_sessions_dropped_total", "reason"), "dropped per second: {{reason}}")]),
        panel("Sessions on decode workers", "short",
              [(f"sum ({series('splice_decode_sessions')})", "kept"),
               (total("splice_decode_sessions_dropped_total", "reason"), "dropped per second: {{reason}}")],
              "Their next turns send only new rows."),
        panel("Prompt tokens that were not sent", "short",
              [(total("splice_decode_session_tokens_total", "pod"), "{{pod}}")],
              "Per second: the decode worker had kept their KV."),
        panel("Pages that sessions keep on decode workers", "short",
              [(f"sum by (pod) ({series('splice_decode_session_pages')})", "{{pod}}")], "They give way to requests."),
        panel("Pages that sessions keep", "short", [(f"sum by (pod) ({series('splice_prefill_session_pages')})", "{{pod}}")]),
        panel("Segments computed by themselves", "short",
              [(total("splice_prefill_canonical_segments_total", "result"), "{{result}}"),
               (f"sum ({series('splice_prefill_canonical_queued')})", "queued")], "Per second; queued: now."),
        panel("Tokens computed for that", "short", [(total("splice_prefill_canonical_tokens_total"), "tokens")], "Per second."),
        panel("Knowledge bases in local pages", "short",
              [(f"sum by (pod) ({series('splice_prefill_frozen_tokens')})", "{{pod}} tokens"),
               (f"sum by (pod) ({series('splice_prefill_frozen_sources')})", "{{pod}} segments"),
               (total("splice_prefill_frozen_dropped_total", "pod"), "{{pod}} made room, per second")]),
        panel("Publishing", "short", [(total("splice_kb_publishes_total", "result"), "versions {{result}}"),
                                      (total("splice_prefill_published_chunks_total", "result"), "chunks {{result}}")], "Per second."),
        panel("Bytes published", "Bps", [(total("splice_prefill_published_bytes_total"), "published")]),
    ]


def transfer():
    return [
        panel("KV moved", "Bps", [(total("splice_kv_transfer_bytes_total", "direction"), "{{direction}}")],
              "out: pushed by prefill workers; in: received and verified by decode workers. They differ by what is on its way or failed."),
        panel("From the last layer to the acknowledgement", "s", quantiles("splice_kv_transfer_seconds"),
              "What pushing did not hide behind computing."),
        panel("Bytes per prompt token", "decbytes",
              [(share(total("splice_kv_transfer_bytes_total", direction="out"), total("splice_prompt_tokens_total", component="prefill")),
                "pushed")], "Head classes make it smaller."),
        panel("Failures", "short", [(total("splice_kv_transfer_failures_total", "reason"), "{{reason}}")],
              "Per second. checksum: bytes were damaged and not used."),
        panel("Tickets", "short", [(f"sum by (pod) ({series('splice_kv_leases_outstanding', component='decode')})", "{{pod}} may be written"),
                                   (f"sum by (pod) ({series('splice_kv_tickets_quarantined')})", "{{pod}} quarantined"),
                                   (f"sum by (pod) ({series('splice_kv_tickets_stuck')})", "{{pod}} stuck")]),
        panel("Writers cut off", "short", [(total("splice_kv_writers_cut_total", "pod"), "{{pod}}")],
              "Connections per second that decode workers tore down, because a ticket had expired and its writer did not answer."),
        panel("Tickets expired", "short", [(total("splice_kv_leases_expired_total", "pod", component="decode"), "{{pod}}")], "Per second."),
        panel("Tickets refused", "short", [(total("splice_kv_tickets_refused_total", "component, reason"), "{{component}} {{reason}}")],
              "Per second. Replayed or of another generation: somebody repeats what is over."),
        panel("Tickets given up", "short", [(f"sum by (pod) ({series('splice_prefill_tickets_revoked')})", "{{pod}} remembered"),
                                            (total("splice_prefill_late_runs_total"), "calls that came too late, per second")]),
        panel("Pages held by decode workers", "short", [(f"sum by (pod) ({series('splice_kv_pages_used', component='decode')})", "{{pod}}")],
              "Returns to 0 without requests."),
        panel("Steps of adaptive requests", "short", [(total("splice_decode_adaptive_tokens_total", "step"), "{{step}} tokens"),
                                                      (total("splice_decode_guarded_heads_total"), "heads that the guard made dense")],
              "Per second."),
    ]


def store():
    hits = total("splice_store_hits_total")
    return [
        panel("Hit rate", "percentunit", [(share(hits, f"({hits} + {total('splice_store_misses_total')})"), "hits")],
              "Chunks served, of chunks asked for."),
        panel("Chunks served", "short", [(total("splice_store_hits_total", "tier"), "{{tier}}"), (total("splice_store_misses_total"), "missed")],
              "Per second.", stack=True),
        panel("Read by prefill workers", "Bps", [(total("splice_store_fetched_bytes_total", "pod"), "{{pod}}")]),
        panel("Measured rate of the stores", "Bps", [(series("splice_store_link_bytes_per_second"), "{{pod}}")],
              "By which workers choose between fetching and computing."),
        panel("Measured latency of the stores", "s", [(series("splice_store_link_latency_seconds"), "{{pod}}")]),
        panel("Computed although stored", "short", [(total("splice_store_skipped_tokens_total", "reason"), "{{reason}}")],
              "Tokens per second. Slower: the store would take longer."),
        panel("Use of the tiers", "percentunit",
              [(share(series("splice_store_used_bytes"), f"({series('splice_store_capacity_bytes')} > 0)"), "{{pod}} {{tier}}")]),
        panel("Chunks", "short", [(f"sum by (tier) ({series('splice_store_chunks')})", "{{tier}}")]),
        panel("Accepted", "Bps", [(total("splice_store_stored_bytes_total", "pod"), "{{pod}}")]),
        panel("Chunks accepted", "short", [(total("splice_store_chunks_stored_total", "pod"), "{{pod}}")], "Per second; those that were not stored before."),
        panel("Taken out", "short", [(total("splice_store_evictions_total", "tier"), "evicted from {{tier}}"),
                                     (total("splice_store_expired_total"), "expired"),
                                     (total("splice_store_quota_refused_total"), "refused: quota"),
                                     (total("splice_store_write_dropped_total"), "not written to disk"),
                                     (total("splice_store_corrupt_dropped_total"), "damaged"),
                                     (total("splice_store_index_resets_total"), "damaged indexes set aside")], "Per second."),
        panel("Disk", "s", [(quantile(0.95, "splice_store_disk_read_seconds"), "read one chunk, p95"),
                            (quantile(0.95, "splice_store_disk_write_seconds"), "group commit, p95")]),
        panel("Waiting for the disk", "short", [(f"sum by (pod) ({series('splice_store_write_queue_chunks')})", "{{pod}}")], "Chunks."),
        panel("Stores as prefill workers see them", "short", [(f"min by (node) ({series('splice_store_node_up')})", "{{node}}")], "1: asked."),
        panel("Calls without an answer", "short", [(total("splice_store_node_failures_total", "node"), "{{node}}")], "Per second."),
        panel("Leases", "short", [(f"sum by (pod) ({series('splice_kv_leases_outstanding', component='store')})", "{{pod}} in use"),
                                  (total("splice_kv_leases_expired_total", "pod", component="store"), "{{pod}} expired per second"),
                                  (f"sum by (pod) ({series('splice_store_quarantined_bytes')})", "{{pod}} quarantined bytes")]),
    ]


def fidelity():
    return [
        panel("Most likely token is the same", "percentunit",
              [(share(total("splice_fidelity_top1_equal_total", "stage, method"), total("splice_fidelity_samples_total", "stage, method")),
                "{{stage}} {{method}}")], "Of the sampled positions that were also computed exactly."),
        panel("Of the ten most likely, the same (median)", "percentunit",
              [(quantile(0.5, "splice_fidelity_top10_share", "stage, method"), "{{stage}} {{method}}")]),
        panel("Cosine of the logits, lowest twentieth", "none",
              [(quantile(0.05, "splice_fidelity_cosine", "stage, method"), "{{stage}} {{method}}")]),
        panel("Exact attention on what the method looks at (median)", "percentunit",
              [(quantile(0.5, "splice_fidelity_kept_mass", "stage, method"), "{{stage}} {{method}}")]),
        panel("Positions compared", "short", [(total("splice_fidelity_samples_total", "stage, method"), "{{stage}} {{method}}"),
                                              (total("splice_fidelity_skipped_total", "stage, method"), "{{stage}} {{method}} skipped")],
              "Per second. Below some hundred a day the other panels say little."),
        panel("Methods that were chosen", "short", [(total("splice_prefill_choices_total", "method, why"), "{{method}}: {{why}}")], "Prompts per second."),
        panel("Records of agreement", "short", [(f"sum by (pod) ({series('splice_fidelity_records')})", "{{pod}}"),
                                                (total("splice_fidelity_records_forgotten_total", "pod"), "{{pod}} forgotten per second")],
              "Namespaces and methods, 4,096 a worker; forgotten ones are judged anew."),
        panel("Prompts whose heads chose lines", "short", [(total("splice_prefill_line_prompts_total"), "prompts")], "Per second."),
        panel("Heads by what they attended to", "percentunit",
              [(share(total("splice_prefill_line_heads_total", "kind"),
                      f"on () group_left () {total('splice_prefill_line_heads_total')}"), "{{kind}}")], stack=True),
        panel("Attention that lines have (lowest twentieth)", "percentunit",
              [(quantile(0.05, "splice_prefill_line_covered_share"), "rows of the sample"),
               (quantile(0.05, "splice_prefill_line_held_out_share"), "rows outside of it")]),
        panel("Cells that lines cost (median)", "percentunit", [(quantile(0.5, "splice_prefill_line_cells_share"), "of a causal prefill's")]),
    ]


def target(line, index):
    expression, legend = line
    return {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend,
            "datasource": {"type": "prometheus", "uid": "${datasource}"}}


def variable(name, query):
    return {"name": name, "label": name.capitalize(), "type": "query", "query": {"query": query, "refId": name},
            "definition": query, "datasource": {"type": "prometheus", "uid": "${datasource}"}, "refresh": 2, "sort": 1,
            "includeAll": True, "allValue": ".*", "multi": True, "current": {"text": "All", "value": "$__all"}}


def dashboard(name, title, panels):
    x = y = 0
    drawn = []
    for index, p in enumerate(panels):
        if x + p["width"] > COLUMNS:
            x, y = 0, y + HEIGHT
        custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if p["stack"] else 5, "showPoints": "never",
                  "stacking": {"mode": "normal" if p["stack"] else "none", "group": "A"}}
        drawn.append({
            "id": index + 1, "title": p["title"], "description": p["description"], "type": p["kind"],
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "gridPos": {"x": x, "y": y, "w": p["width"], "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": p["unit"], "min": 0, "custom": custom}, "overrides": []},
            "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
            "targets": [target(line, i) for i, line in enumerate(p["lines"])],
        })
        x += p["width"]
    return {
        "uid": f"splice-{name}", "title": f"Splice / {title}", "tags": ["splice"], "schemaVersion": 39, "version": 1,
        "editable": True, "refresh": "30s", "time": {"from": "now-3h", "to": "now"}, "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["splice"], "title": "Splice", "asDropdown": True, "includeVars": True,
                   "keepTime": True}],
        "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
            variable("namespace", "label_values(splice_kv_pages_used, namespace)"),
            variable("release", 'label_values(splice_kv_pages_used{namespace=~"$namespace"}, release)'),
        ]},
        "panels": drawn,
    }


DASHBOARDS = {
    "overview": ("Overview", overview), "pools": ("Pools", pools), "reuse": ("Reuse", reuse),
    "transfer": ("KV transfer", transfer), "store": ("Chunk store", store), "fidelity": ("Fidelity", fidelity),
}


def texts():
    """File name -> content, of all dashboards."""
    return {f"{name}.json": json.dumps(dashboard(name, title, make()), indent=1) + "\n"
            for name, (title, make) in DASHBOARDS.items()}


def main():
    if "--check" in sys.argv[1:]:
        stale = [name for name, text in texts().items() if (HERE / name).read_text() != text]
        sys.exit(f"stale: {', '.join(stale)}; run deploy/grafana/make_dashboards.py" if stale else 0)
    for name, text in texts().items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
