// The page behind /ui: fleet, pools and requests, read from /control/v1/. One self-contained file.
#pragma once

#include <string_view>

namespace spl::router {

inline constexpr std::string_view kUiPage = R"html(<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Splice</title>
<style>
 :root { color-scheme: light dark; --line: #8884; --dim: #888; --bar: #3b82f6; --warn: #d97706; --bad: #dc2626; }
 body { font: 14px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1.5em; max-width: 1200px; }
 h1 { font-size: 1.3em; margin: 0 0 .2em; } h2 { font-size: 1.05em; margin: 1.6em 0 .4em; }
 table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; color: var(--dim); }
 th, td { padding: .25em .7em .25em 0; border-bottom: 1px solid var(--line); vertical-align: top; }
 td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
 .dim { color: var(--dim); } .bad { color: var(--bad); } .warn { color: var(--warn); }
 .bar { display: inline-block; width: 8em; height: .7em; background: var(--line); border-radius: .3em; overflow: hidden; }
 .bar > i { display: block; height: 100%; background: var(--bar); }
 .bar > i.segment { background: var(--warn); float: left; } .bar > i.prefix { float: left; }
 #heads { border-collapse: separate; border-spacing: 2px; width: auto; } #heads td { border: 0; padding: 0; }
 #heads td:not(.dim) { width: 1em; height: .8em; border-radius: .15em; background: var(--line); } #heads td.g { background: var(--bar); }
 #heads td.dim { padding-right: .6em; font-size: .8em; text-align: right; }
 #ask { margin: 1em 0; } input { font: inherit; padding: .2em .4em; width: 24em; }
</style>
<h1>Splice</h1><div id="head" class="dim" aria-live="polite">…</div>
<form id="ask" hidden><label>Operator's API key <input id="key" type="password" autocomplete="off"></label> <button>Show</button></form>
<h2>Pools</h2><table id="pools"></table>
<h2>Prompt tokens</h2><div id="reuse" class="dim">…</div>
<h2>Workers</h2><table id="workers"></table>
<h2>Requests under way</h2><table id="active"></table>
<h2>Requests that ended</h2><table id="recent"></table>
<h2>Head classes</h2><div id="headnote" class="dim">…</div><table id="heads"></table>
<script>
'use strict';
let key = sessionStorage.getItem('key') || '';
const $ = id => document.getElementById(id);
const get = async path => {
  const answer = await fetch('/control/v1/' + path, key ? {headers: {authorization: 'Bearer ' + key}} : {});
  const body = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(body.error.message), {status: answer.status});
  return body;
};
const num = (x, digits = 0) => Number(x).toLocaleString('en', {maximumFractionDigits: digits});
const secs = s => s < 1 ? num(s * 1000) + ' ms' : s < 120 ? num(s, 1) + ' s' : num(s / 60) + ' min';
// Cells are strings, numbers (right-aligned), or {text, tone, share}.
const fill = (id, head, rows, empty) => {
  const table = document.createDocumentFragment();
  const add = (cells, tag) => {
    const tr = document.createElement('tr');
    for (const cell of cells) {
      const td = document.createElement(tag), c = typeof cell === 'object' ? cell : {text: cell};
      td.textContent = typeof c.text === 'number' ? num(c.text, 1) : c.text;
      if (typeof c.text === 'number' || c.right) td.className = 'n';
      if (c.tone) td.classList.add(c.tone);
      if (c.share !== undefined) {
        const bar = document.createElement('span'), part = document.createElement('i');
        bar.className = 'bar'; part.style.width = Math.min(100, 100 * c.share) + '%';
        bar.append(part); td.append(' ', bar);
      }
      tr.append(td);
    }
    table.append(tr);
  };
  // A heading stands over its column's numbers.
  add(head.map((text, i) => rows.length && (typeof rows[0][i] === 'number' || rows[0][i].right) ? {text, right: true} : text), 'th');
  for (const row of rows) add(row, 'td');
  if (!rows.length) { add([{text: empty, tone: 'dim'}], 'td'); table.lastChild.lastChild.colSpan = head.length; }
  $(id).replaceChildren(table);
};
// Where the KV of all prompts so far came from.
const reuse = t => {
  const all = t.prefix + t.segment + t.miss, percent = x => num(100 * x / all, 1) + ' %', bar = document.createElement('span');
  if (!all) { $('reuse').textContent = 'no prompt yet'; return; }
  bar.className = 'bar';
  for (const kind of ['prefix', 'segment']) {
    const part = document.createElement('i');
    part.className = kind; part.style.width = 100 * t[kind] / all + '%'; bar.append(part);
  }
  $('reuse').replaceChildren(bar, ` of ${num(all)}: ${percent(t.prefix)} reused as prefixes, ${percent(t.segment)} as segments, ${percent(t.miss)} computed`);
};
const heads = map => {
  const globals = map.join('').split('g').length - 1, all = map.join('').length;
  $('headnote').textContent = all ? `${globals} of ${all} KV heads keep everything while decoding (filled), the others a window; a row is a layer`
                                  : 'the workers have none: every head keeps everything';
  $('heads').replaceChildren(...map.map((layer, i) => {
    const tr = document.createElement('tr'), name = document.createElement('td');
    name.className = 'dim'; name.textContent = i; tr.append(name);
    for (const head of layer) { const td = document.createElement('td'); td.className = head; td.title = `layer ${i}: ${head === 'g' ? 'global' : 'local'}`; tr.append(td); }
    return tr;
  }));
};
const state = w => w.draining ? {text: 'draining', tone: 'warn'} : {text: 'ready'};
const request = r => [r.request_id, r.caller || '–', r.stage === 'done' ? {text: r.status, tone: r.status === 'OK' ? '' : 'bad'} : r.stage,
  r.reuse || 'auto', r.decode || 'auto', r.tokens.prompt,
  {text: r.tokens.prompt ? num(100 * r.tokens.cached / r.tokens.prompt) + ' %' : '–', right: true},
  r.tokens.completion, {text: r.seconds.ttft ? secs(r.seconds.ttft) : '–', right: true}, {text: secs(r.seconds.total), right: true},
  (r.workers.prefill || '–') + ' → ' + (r.workers.decode || '–') + (r.migrations ? ', moved ' + r.migrations + '×' : '')];
const requestHead = last => ['request', 'caller', last, 'reuse', 'decode', 'prompt', 'reused', 'output', 'first token', 'seconds', 'workers'];
const show = async () => {
  try {
    const [s, workers, requests] = await Promise.all([get('status'), get('workers'), get('requests')]);
    $('ask').hidden = true;
    $('head').className = s.ready ? 'dim' : 'bad';
    $('head').textContent = `${s.model.name}, context ${num(s.model.max_context)} · ${s.ready ? 'ready' : 'not ready: no connected pair of workers'}` +
      `${s.draining ? ' · draining' : ''} · ${num(s.requests.running)} running, ${num(s.requests.waiting)} waiting · up ${secs(s.uptime_seconds)} · ${s.version}`;
    const p = s.pools.prefill, d = s.pools.decode, used = d.total_pages ? 1 - d.free_pages / d.total_pages : 0;
    fill('pools', ['pool', 'workers', 'draining', 'load', ''], [
      ['prefill', p.workers, p.draining, num(p.queued_tokens) + ' tokens queued', num(p.tokens_per_second) + ' tokens/s'],
      ['decode', d.workers, d.draining, num(d.sequences) + ' of ' + num(d.max_sequences) + ' KV reservations',
       {text: 'KV ' + num(100 * used) + ' %', share: used}]], '');
    reuse(s.prompt_tokens);
    heads(s.model.head_map);
    fill('workers', ['worker', 'role', 'state', 'load', 'speed', 'address', 'KV connections'], workers.data.map(w =>
      w.role === 'prefill'
        ? [w.worker, w.role, state(w), num(w.queued_tokens) + ' tokens queued', num(w.tokens_per_second) + ' tokens/s', w.address,
           w.links.map(l => `${l.decode}: ${l.transport}, ${num(l.bytes_per_second / 1e9, 1)} GB/s`).join('; ') || {text: 'none', tone: 'bad'}]
        : [w.worker, w.role, state(w), {text: num(w.sequences) + ' sequences, KV ' + num(w.total_pages ? 100 * (1 - w.free_pages / w.total_pages) : 0) + ' %',
           share: w.total_pages ? 1 - w.free_pages / w.total_pages : 0}, num(w.step_seconds * 1e3, 1) + ' ms a step', w.address, '']), 'no worker answers');
    fill('active', requestHead('stage'), requests.active.map(request), 'none');
    fill('recent', requestHead('outcome'), requests.recent.slice(0, 50).map(request), 'none yet');
  } catch (error) {
    $('head').className = 'bad';
    $('head').textContent = error.message;
    if (error.status === 401 || error.status === 403) $('ask').hidden = false;
  }
};
$('ask').addEventListener('submit', event => {
  event.preventDefault(); key = $('key').value; sessionStorage.setItem('key', key); show();
});
show(); setInterval(() => { if (!document.hidden) show(); }, 2000);
</script></html>
)html";

}  // namespace spl::router
