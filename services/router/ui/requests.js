// Requests: those under way and the last that ended; one of them with its stages and what ran.
import {get, post} from './api.js';
import {$, el, fillTable, pairs, shareBar} from './dom.js';
import {bytes, clock, num, percent, seconds, shortId} from './format.js';

const kShown = 100;
// Stages of the time to first token in the order in which a request passes through them (docs/metrics.md).
const kStages = {
  accept: 'from the complete request to a thread that reads it', tokenize: 'chat template, tokens, keys',
  queue: 'waiting for a turn, or for room on a decode worker', dispatch: 'choosing workers', reserve: 'decode worker: reserving pages',
  prefill_worker: 'prefill worker, outside of its engine', prefill_queue: 'prefill worker: waiting for pages or the engine',
  lookup: 'prefill worker: finding cached parts', fetch: 'prefill worker: chunks from the store', prefill: 'prefill worker: computing',
  network: 'the wire, and threads that wait on both ends', deliver: 'text of the first token, until the stream has it',
  retry: 'failed attempts and pauses behind them',
};

const asked = name => name || 'auto';
// "exact", or "auto → sparsex" where it says more than one of them.
const method = (wanted, ran) => (!ran ? asked(wanted) : wanted && wanted !== 'auto' && wanted !== ran ? `${wanted} → ${ran}` : ran);
const differs = (wanted, ran) => Boolean(ran && wanted && wanted !== 'auto' && wanted !== ran);
const outcome = r => (r.stage !== 'done' ? {text: r.stage} : {text: r.status, tone: r.status === 'OK' ? '' : 'bad', wide: r.status !== 'OK'});
const places = r => (r.workers.prefill || '–') + ' → ' + (r.workers.decode || '–') + (r.migrations ? `, moved ${r.migrations}×` : '');
const methodCell = (wanted, ran) => ({text: method(wanted, ran), tone: differs(wanted, ran) ? 'warn' : '', title: `asked: ${asked(wanted)}`});

const row = r => ({key: r.request_id + r.started_unix_ms, cells: [
  {text: shortId(r.request_id), title: r.request_id, href: '#requests/' + encodeURIComponent(r.request_id), mono: true},
  r.caller || '–', outcome(r), methodCell(r.reuse, r.ran && r.ran.reuse), methodCell(r.decode, r.ran && r.ran.decode),
  r.tokens.prompt, {text: r.tokens.prompt ? percent(r.tokens.cached / r.tokens.prompt) : '–', right: true}, r.tokens.completion,
  {text: r.seconds.ttft ? seconds(r.seconds.ttft) : '–', right: true}, {text: seconds(r.seconds.total), right: true}, {text: places(r), wide: true}]});
const head = last => ['request', 'caller', last, 'reuse', 'decode', 'prompt', 'reused', 'output', 'first token', 'total', 'workers'];

const matches = (r, text) => {
  const ran = r.ran ? [r.ran.reuse, r.ran.decode] : [];
  return [r.request_id, r.trace_id, r.caller, r.api, r.stage, r.status, asked(r.reuse), asked(r.decode), ...ran, r.workers.prefill, r.workers.decode]
    .some(field => field && field.toLowerCase().includes(text));
};

let traceUrl = '';
let lists = {active: [], recent: []};
const fill = () => {
  const text = $('filter').value.trim().toLowerCase();
  const none = text ? 'none that matches' : 'none';
  fillTable($('active'), head('stage'), lists.active.filter(r => matches(r, text)).map(row), none);
  fillTable($('recent'), head('outcome'), lists.recent.filter(r => matches(r, text)).slice(0, kShown).map(row), none);
};

const legend = parts => el('p', {class: 'legends'}, parts.map(([name, text, tone]) => el('span', {class: 'legend'}, el('i', {class: tone}), `${name} ${text}`)));

// The whole request: up to its first token, and behind it.
const wholeBar = r => {
  // A running one's total begins behind the stage accept.
  const first = r.seconds.ttft || r.seconds.total, total = Math.max(r.seconds.total, first), rest = total - first;
  const parts = [[r.seconds.ttft ? 'to the first token' : 'no token yet', first, 'c-blue'], ['decoding', rest, 'c-green']].filter(([, s]) => s > 0);
  return [shareBar(parts.map(([name, s, tone]) => ({share: s / total, tone, title: name})), true),
          legend(parts.map(([name, s, tone]) => [name, seconds(s), tone]))];
};

// Stages up to the first token, one behind the other, each with its time.
const stageRows = r => {
  const given = r.seconds.ttft_stages || {};
  const spans = Object.keys(kStages).map(name => [name, given[name] || 0]).filter(([, s]) => s > 0);
  const whole = spans.reduce((sum, [, s]) => sum + s, 0);
  let begin = 0;
  return spans.flatMap(([name, s]) => {
    const bar = el('i', {class: name === 'retry' ? 'c-amber' : 'c-blue'});
    bar.style.left = (100 * begin) / whole + '%';
    bar.style.width = (100 * s) / whole + '%';
    begin += s;
    return [el('span', {title: kStages[name]}, name.replace('_', ' ')), el('div', {class: 'track'}, bar), el('span', {class: 'n'}, seconds(s))];
  });
};

const tokenParts = r => {
  const t = r.ran.tokens;
  return [['prefix', t.prefix - t.stored, 'c-blue'], ['store', t.stored, 'c-green'], ['segment', t.aligned - t.recomputed, 'c-amber'],
          ['recomputed', t.recomputed, 'c-violet'], ['computed', r.tokens.prompt - t.prefix - t.aligned, 'c-grey']].filter(([, n]) => n > 0);
};

const ranPairs = r => {
  if (!r.ran) return pairs([['what ran', 'known with the first token']]);
  const line = (wanted, ran) => el('span', {class: differs(wanted, ran) ? 'warn' : null}, `${ran}`, el('span', {class: 'dim'}, ` · asked: ${asked(wanted)}`));
  return pairs([
    ['reuse that ran', line(r.reuse, r.ran.reuse)], ['decode that ran', line(r.decode, r.ran.decode)],
    ['exact', r.ran.exact ? 'yes: full attention over exact keys' : 'no: approximate'],
    ['prompt computed', r.ran.prefill === 'local' ? 'by the decode worker itself' : 'by a prefill worker'],
    ['KV', `${r.ran.transport || '–'}, ${bytes(r.ran.bytes.moved)} moved` + (r.ran.bytes.fetched ? `, ${bytes(r.ran.bytes.fetched)} from the store` : '')],
    r.ran.transfer_seconds ? ['push behind the last layer', seconds(r.ran.transfer_seconds)] : null]);
};

// Replaces "{trace_id}" in --trace-ui-url; a trace of which nobody recorded a span has no page.
const traceOf = r => {
  const id = r.trace_id || '–';
  if (!traceUrl || !r.traced) return el('span', {class: 'mono'}, id);
  return el('a', {class: 'mono', href: traceUrl.replaceAll('{trace_id}', r.trace_id), target: '_blank', rel: 'noopener noreferrer'}, id);
};

const outcomePairs = r => {
  const steps = r.tokens.completion - 1, rest = r.seconds.total - r.seconds.ttft;
  return pairs([
    [r.stage === 'done' ? 'outcome' : 'stage', el('span', {class: outcome(r).tone || null}, outcome(r).text)],
    ['started', clock(r.started_unix_ms)], ['caller', r.caller || '–'], ['api', r.api], ['workers', places(r)],
    ['tokens', `${num(r.tokens.prompt)} in, ${num(r.tokens.completion)} out`],
    ['first token', r.seconds.ttft ? seconds(r.seconds.ttft) : '–'], ['total', seconds(r.seconds.total)],
    r.seconds.ttft && steps > 0 && rest > 0 ? ['a token', seconds(rest / steps)] : null,
    r.attempts > 1 ? ['attempts', num(r.attempts)] : null,
    ['trace', traceOf(r)]]);
};

const drawDetail = (r, refresh) => {
  const cancel = async () => {
    try {
      await post(`requests/${encodeURIComponent(r.request_id)}/cancel`, {});
    } catch (error) {
      $('detail').append(el('p', {class: 'bad'}, error.message));
    }
    refresh();
  };
  const parts = r.ran && r.tokens.prompt ? tokenParts(r) : [];
  $('detail').replaceChildren(
    el('div', {class: 'title'}, el('h2', {}, 'Request ', el('span', {class: 'mono'}, r.request_id)),
       r.stage === 'done' ? '' : el('button', {type: 'button', on: {click: cancel}}, 'Cancel it'), el('a', {href: '#requests'}, 'Close')),
    el('div', {class: 'columns'}, outcomePairs(r), ranPairs(r)),
    el('h2', {}, 'Time'), ...wholeBar(r), el('div', {class: 'stages'}, stageRows(r)),
    parts.length ? el('h2', {}, 'Prompt tokens') : '',
    parts.length ? shareBar(parts.map(([name, n, tone]) => ({share: n / r.tokens.prompt, tone, title: name})), true) : '',
    parts.length ? legend(parts.map(([name, n, tone]) => [name, num(n), tone])) : '');
};

// `status`: the router's. `id`: of the request that is shown above the lists; null: none.
export const show = async (status, id, refresh, still) => {
  traceUrl = status.trace_ui_url;
  $('filter').oninput = fill;
  const read = await get('requests');
  if (!still()) return;
  lists = read;
  fill();
  $('detail').hidden = !id;
  if (!id) return;
  const here = [...lists.active, ...lists.recent].find(r => r.request_id === id);
  if (here) return drawDetail(here, refresh);
  $('detail').replaceChildren(el('p', {class: 'warn'}, `This router no longer lists request ${id}: it keeps the last 256 that ended, and other routers have their own.`), el('a', {href: '#requests'}, 'Close'));
};
