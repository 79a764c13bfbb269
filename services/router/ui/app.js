// The page's frame: which section is shown (#overview, #workers, #requests, #requests/ID, #chat), the key, the rounds.
import {get, setKey} from './api.js';
import * as chat from './chat.js';
import {$} from './dom.js';
import {num, seconds} from './format.js';
import * as overview from './overview.js';
import * as requests from './requests.js';
import * as workers from './workers.js';

const kRoundMs = 2000;
const kSections = ['overview', 'workers', 'requests', 'chat'];

// "#requests/a%20b?x=y" → {section: "requests", rest: "a b", query}
const place = () => {
  const [path, query] = location.hash.slice(1).split('?');
  const [section, ...rest] = path.split('/');
  return {section: kSections.includes(section) ? section : 'overview', rest: decodeURIComponent(rest.join('/')), query: new URLSearchParams(query)};
};

const frame = s => {
  const state = !s.ready ? ['not ready', 'bad'] : s.draining ? ['draining', 'warn'] : ['ready', 'good'];
  $('state').textContent = state[0];
  $('state').className = 'pill ' + state[1];
  $('head').textContent = `${s.model.name}, context ${num(s.model.max_context)}` + (s.ready ? '' : ' · no connected pair of workers') +
    ` · ${num(s.requests.running)} running, ${num(s.requests.waiting)} waiting · up ${seconds(s.uptime_seconds)} · ${s.version}`;
};

// A link's prompt is taken over once, not in each round.
let linked = null;

// A round that is slower than the next one shows nothing: what it has read may belong to another place.
let rounds = 0;

const round = async () => {
  const {section, rest} = place(), mine = ++rounds, still = () => mine === rounds;
  try {
    const status = await get('status');
    if (!still()) return;
    frame(status);
    if (section === 'overview') await overview.show(status, still);
    if (section === 'workers') await workers.show(status, round, still);
    if (section === 'requests') await requests.show(status, rest || null, round, still);
    if (section === 'chat') chat.show(status, linked);
    if (!still()) return;
    linked = null;
    $('ask').hidden = true;
    $('problem').hidden = true;
  } catch (error) {
    if (!still()) return;
    $('problem').textContent = error.status ? error.message : `the router does not answer: ${error.message}`;
    $('problem').hidden = false;
    if (error.status === 401 || error.status === 403) $('ask').hidden = false;
  }
};

const turn = () => {
  const {section, query} = place();
  for (const name of kSections) $('section-' + name).hidden = name !== section;
  for (const link of document.querySelectorAll('nav a')) {
    if (link.hash === '#' + section) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  linked = query.get('prompt');
  round();
};

$('ask').addEventListener('submit', event => {
  event.preventDefault();
  setKey($('key').value);
  round();
});
chat.begin();
addEventListener('hashchange', turn);
turn();
setInterval(() => {
  if (!document.hidden) round();
}, kRoundMs);
