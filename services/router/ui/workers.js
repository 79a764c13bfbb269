// Workers: state, load, connections, and the switch that drains one or takes it back.
import {get, post} from './api.js';
import {$, el, fillTable} from './dom.js';
import {num, percent} from './format.js';

let workers = [];
let changed = () => {};
let router = '';

const say = (text, tone) => {
  $('switched').className = tone;
  $('switched').textContent = text;
  $('switched').hidden = false;
};

const ask = (worker, draining) => {
  const same = workers.filter(w => w.role === worker.role && !w.draining);
  const last = draining && same.length === 1 && same[0].worker === worker.worker;
  const go = async () => {
    $('switch').hidden = true;
    say(`asking ${worker.worker} …`, 'dim');
    try {
      await post(`workers/${encodeURIComponent(worker.worker)}/drain`, {draining});
      say(draining ? `${worker.worker} is draining: it finishes what it has and gets nothing new` : `${worker.worker} takes requests again`, 'good');
    } catch (error) {
      say(`${worker.worker} was not changed: ${error.message}`, 'bad');
    }
    changed();
  };
  const yes = el('button', {class: 'main', id: 'switch-yes', on: {click: go}}, draining ? `Drain ${worker.worker}` : `Take ${worker.worker} back`);
  $('switch').replaceChildren(
    el('p', {}, draining ? `${worker.worker} finishes the requests that it has and gets nothing new from any router.`
                         : `${worker.worker} gets new requests again.`),
    last ? el('p', {class: 'warn'}, `It is the last ${worker.role} worker that takes requests: new ones will wait, then fail.`) : '',
    el('div', {class: 'bar-of-controls'}, yes, el('button', {on: {click: () => { $('switch').hidden = true; }}}, 'Leave it')));
  $('switch').hidden = false;
  yes.focus();
};

const switchCell = worker => ({
  same: worker.worker + worker.draining,
  wide: true,
  node: el('button', {type: 'button', on: {click: () => ask(worker, !worker.draining)}}, worker.draining ? 'Take back' : 'Drain'),
});

const kv = w => (w.total_pages ? 1 - w.free_pages / w.total_pages : 0);
const kvCell = w => (w.total_pages ? {text: percent(kv(w)), share: kv(w)} : '–');
const links = w => w.links.map(l => `${l.decode}: ${l.transport}` + (l.bytes_per_second ? `, ${num(l.bytes_per_second / 1e9, 1)} GB/s` : '')).join('; ');

// "0.1.0 (1a2b3c4d5e6f)": in the midst of an upgrade some differ from this router's.
const versionCell = version => ({text: version || 'not said', mono: true, tone: version && version !== router ? 'warn' : '', title: `this router: ${router}`});

const row = w => {
  const prefill = w.role === 'prefill';
  return {key: w.worker, cells: [
    w.worker, w.role, w.draining ? {text: 'draining', tone: 'warn'} : {text: 'ready', tone: 'good'},
    prefill ? num(w.queued_tokens) + ' tokens queued' : `${num(w.sequences)} of ${num(w.max_sequences)} sequences`,
    kvCell(w),
    prefill ? num(w.tokens_per_second) + ' tokens/s' : num(w.step_seconds * 1e3, 1) + ' ms a step',
    {text: w.address, mono: true}, versionCell(w.version),
    prefill ? {text: links(w) || 'none', tone: links(w) ? '' : 'bad', wide: true}
            : w.local_prefill ? {text: `prefills up to ${num(w.local_prefill.max_new_tokens)} new tokens itself`, wide: true} : '',
    switchCell(w)]};
};

// `status`: the router's own. `refresh`: called once a worker was switched.
export const show = async (status, refresh, still) => {
  router = status.version + (status.commit ? ` (${status.commit})` : '');
  changed = refresh;
  const read = (await get('workers')).data;
  if (!still()) return;
  workers = read;
  fillTable($('workerlist'), ['worker', 'role', 'state', 'load', 'KV', 'speed', 'address', 'version', 'KV connections', ''], workers.map(row), 'no worker answers');
};
