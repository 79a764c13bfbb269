// Overview: what happens now, the charts, the pools, where prompts' KV came from, the head classes.
import {get} from './api.js';
import {Chart} from './charts.js';
import {$, el, fillTable, shareBar} from './dom.js';
import {num, percent, seconds, short} from './format.js';
import {kCharts} from './series.js';

const kRanges = [[300, '5 min'], [900, '15 min'], [1800, '30 min']];
let span = 1800;
let charts = null;
let history = null;
let asked = 0;  // when the history was read last

const draw = () => {
  for (const chart of charts) chart.update(history, span);
};

const begin = () => {
  charts = kCharts.map(spec => new Chart(spec));
  $('charts').append(...charts.map(chart => chart.node));
  const buttons = kRanges.map(([length, name]) => el('button', {type: 'button', on: {click: () => choose(length)}}, name));
  const choose = length => {
    span = length;
    buttons.forEach((button, i) => button.setAttribute('aria-pressed', kRanges[i][0] === span));
    if (history) draw();
  };
  $('ranges').append(...buttons);
  choose(span);
};

const latest = column => (history ? history.columns[column].findLast(v => v !== null) : undefined);

const tiles = s => {
  const d = s.pools.decode, t = s.prompt_tokens, all = t.prefix + t.segment + t.miss;
  const last = (column, format) => (latest(column) === undefined ? '–' : format(latest(column)));
  const shown = [
    [num(s.requests.running), 'requests running'],
    [num(s.requests.waiting), 'waiting'],
    [last('output_tokens_per_second', short), 'output tokens a second'],
    [last('ttft_p95_seconds', seconds), 'to the first token, p95'],
    [last('itl_p95_seconds', seconds), 'between tokens, p95'],
    [d.total_pages ? percent(1 - d.free_pages / d.total_pages) : '–', 'of decode KV pages in use'],
    [all ? percent((t.prefix + t.segment) / all) : '–', 'of prompt tokens reused'],
  ];
  $('tiles').replaceChildren(...shown.map(([value, name]) => el('div', {class: 'tile'}, el('b', {}, value), el('span', {}, name))));
};

const pools = s => {
  const p = s.pools.prefill, d = s.pools.decode, used = d.total_pages ? 1 - d.free_pages / d.total_pages : 0;
  fillTable($('pools'), ['pool', 'workers', 'draining', 'load', 'speed and KV'], [
    {key: 'prefill', cells: ['prefill', p.workers, p.draining, num(p.queued_tokens) + ' tokens queued', num(p.tokens_per_second) + ' tokens/s']},
    {key: 'decode', cells: ['decode', d.workers, d.draining, `${num(d.sequences)} of ${num(d.max_sequences)} sequences`,
                            {text: 'KV ' + percent(used), share: used}]}], '');
};

// Where the KV of all prompts so far came from.
const reuse = t => {
  const all = t.prefix + t.segment + t.miss;
  if (!all) return $('reuse').replaceChildren('no prompt yet');
  const of = x => percent(x / all, 1);
  $('reuse').replaceChildren(
    shareBar([{share: t.prefix / all, tone: 'c-blue'}, {share: t.segment / all, tone: 'c-amber'}]),
    ` of ${num(all)}: ${of(t.prefix)} reused as prefixes, ${of(t.segment)} as segments, ${of(t.miss)} computed`);
};

let drawnMap = '';
const heads = map => {
  const all = map.join('');
  if (drawnMap === map.join(' ')) return;
  drawnMap = map.join(' ');
  const globals = all.split('g').length - 1;
  $('headnote').textContent = all
    ? `${globals} of ${all.length} KV heads keep everything while decoding (filled), the others a window; a row is a layer`
    : 'the workers have none: every head keeps everything';
  $('heads').replaceChildren(...map.map((layer, i) =>
    el('tr', {}, el('td', {class: 'dim'}, i),
       [...layer].map(head => el('td', {class: head, title: `layer ${i}: ${head === 'g' ? 'global' : 'local'}`})))));
};

export const show = async (status, still) => {
  if (!charts) begin();
  const now = performance.now();
  if (!history || now - asked >= 1e3 * history.period_seconds) {
    const read = await get('history?seconds=1800');
    if (!still()) return;
    asked = now;
    history = read;
    draw();
  }
  tiles(status);
  pools(status);
  reuse(status.prompt_tokens);
  heads(status.model.head_map);
};
