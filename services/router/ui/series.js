// The charts: which columns of /control/v1/history they show, and how.
import {num, percent, seconds, short} from './format.js';

// Percentiles are steps of one colour: their order is seen. Kinds are colours of their own.
const percentiles = of => [
  {column: of + '_p99_seconds', name: 'p99', tone: 'c-high'},
  {column: of + '_p95_seconds', name: 'p95', tone: 'c-middle'},
  {column: of + '_p50_seconds', name: 'p50', tone: 'c-low'},
];

// `floor`: the axis reaches at least this far. `top`: it always ends here.
export const kCharts = [
  {id: 'tokens', title: 'Output tokens a second', format: short, floor: 1,
   lines: [{column: 'output_tokens_per_second', name: 'tokens/s', tone: 'c-blue'}]},
  {id: 'ttft', title: 'Time to first token', format: seconds, floor: 0.001, lines: percentiles('ttft')},
  {id: 'itl', title: 'Between tokens', format: seconds, floor: 0.001, lines: percentiles('itl')},
  {id: 'queue', title: 'Requests running and waiting', format: v => num(v), floor: 4, whole: true,
   lines: [{column: 'requests_running', name: 'running', tone: 'c-blue'},
           {column: 'requests_waiting', name: 'waiting', tone: 'c-amber'}]},
  {id: 'kv', title: 'KV pages in use', format: v => percent(v, 1), top: 1,
   lines: [{column: 'decode_kv_share', name: 'decode', tone: 'c-blue'},
           {column: 'prefill_kv_share', name: 'prefill', tone: 'c-green'}]},
  {id: 'reuse', title: 'Prompt tokens a second, by source', format: short, floor: 1, stacked: true,
   lines: [{column: 'prompt_local_tokens_per_second', name: 'prefix', tone: 'c-blue'},
           {column: 'prompt_store_tokens_per_second', name: 'store', tone: 'c-green'},
           {column: 'prompt_segment_tokens_per_second', name: 'segment', tone: 'c-amber'},
           {column: 'prompt_recomputed_tokens_per_second', name: 'recomputed', tone: 'c-violet'},
           {column: 'prompt_computed_tokens_per_second', name: 'computed', tone: 'c-grey'}]},
  {id: 'rate', title: 'Requests ended a second', format: short, floor: 0.2,
   lines: [{column: 'requests_per_second', name: 'all', tone: 'c-blue'},
           {column: 'errors_per_second', name: 'failed', tone: 'c-amber'}]},
  {id: 'backlog', title: 'Prompt tokens queued at prefill workers', format: v => num(v), floor: 10, whole: true,
   lines: [{column: 'prefill_queued_tokens', name: 'tokens', tone: 'c-blue'}]},
];

// Longest pause between two samples that is still one line, in periods.
const kGap = 2.5;

// The part of a history that a chart of `span` seconds shows: {t0, t1, times, values: [per line], breaks}. A young
// router's chart is as long as its life, and a minute at least.
export const clip = (history, lines, span) => {
  const times = history.unix_ms, t1 = times.length ? times[times.length - 1] : Date.now();
  const t0 = Math.min(t1 - 60e3, Math.max(t1 - span * 1e3, times.length ? times[0] : t1));
  let first = 0;
  while (first < times.length && times[first] < t0) ++first;
  const shown = times.slice(first), longest = kGap * history.period_seconds * 1e3;
  return {
    t0, t1, times: shown,
    values: lines.map(line => history.columns[line.column].slice(first)),
    breaks: shown.map((t, i) => i > 0 && t - shown[i - 1] > longest),
  };
};

// Each line on top of those before it; nothing counts as 0.
export const stack = values => {
  const sums = new Array(values.length ? values[0].length : 0).fill(0);
  return values.map(line => line.map((v, i) => (sums[i] += v || 0)));
};

// Runs of samples without a hole or a break: [[i, j), …].
export const runs = (line, breaks) => {
  const out = [];
  let begin = -1;
  for (let i = 0; i <= line.length; ++i) {
    const here = i < line.length && line[i] !== null;
    if (begin >= 0 && (!here || breaks[i])) {
      out.push([begin, i]);
      begin = -1;
    }
    if (here && begin < 0) begin = i;
  }
  return out;
};

// Round numbers from 0 to at least `most`, about `count` of them.
export const ticks = (most, count, whole) => {
  const rough = most / count, power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map(f => f * power).find(s => s >= rough * 0.999);
  if (whole) step = Math.max(1, Math.ceil(step));
  const out = [];
  for (let k = 0; (k - 1) * step < most * 0.999; ++k) out.push(k * step);
  return out;
};

// Places of the time axis, in seconds ago: about four round ones.
export const timeTicks = span => {
  const step = [10, 15, 30, 60, 120, 300, 600].find(s => span / s <= 5) || 600;
  const out = [];
  for (let s = 0; s <= span + 1; s += step) out.push(s);
  return out;
};
