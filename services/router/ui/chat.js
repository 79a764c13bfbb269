// Chat: a conversation with the model, and beside it the receipt of the answer while it streams.
import {get, streamChat} from './api.js';
import {$, el, pairs} from './dom.js';
import {num, percent, seconds, short} from './format.js';

let messages = [];
let model = '';
let running = null;  // AbortController of the answer that streams

// Names of the methods, once.
const offer = (select, names) => {
  if (!select.options.length) select.append(...['auto', ...names].map(name => el('option', {value: name}, name)));
};

const body = () => {
  const chosen = {};
  if ($('reuse-method').value !== 'auto') chosen.reuse = $('reuse-method').value;
  if ($('decode-method').value !== 'auto') chosen.decode = $('decode-method').value;
  const out = {model, messages, stream: true, stream_options: {include_usage: true}, max_tokens: Number($('max-tokens').value) || 256};
  if ($('temperature').value !== '') out.temperature = Number($('temperature').value);
  if (Object.keys(chosen).length) out.splice = chosen;
  return out;
};

// One answer's numbers: this browser's clock until the router's receipt is there.
class Receipt {
  constructor() {
    this.begin = performance.now();
    this.pieces = 0;
    this.state = 'sent';
    this.draw();
  }
  onPiece() {
    this.last = performance.now();
    if (!this.pieces++) this.first = this.last;
    this.state = 'streaming';
    this.draw();
  }
  // From /control/v1/requests/{id}, while the answer streams.
  onRecord(record) {
    this.record = record;
    this.draw();
  }
  // `receipt`: the router's own, with the last event.
  onEnd(state, receipt, usage) {
    Object.assign(this, {state, receipt, usage, ended: true});
    this.draw();
  }
  rate() {
    const tokens = this.usage ? this.usage.completion_tokens : this.record ? this.record.tokens.completion : this.pieces;
    return tokens > 1 && this.last > this.first ? (tokens - 1) / ((this.last - this.first) / 1e3) : 0;
  }
  draw() {
    const {receipt: final, record} = this, ran = record && record.ran;
    const tokens = final ? final.tokens : ran ? {prompt: record.tokens.prompt, cached: ran.tokens.prefix, ...ran.tokens} : null;
    const ttft = final ? final.seconds.ttft : record && record.seconds.ttft ? record.seconds.ttft : this.first ? (this.first - this.begin) / 1e3 : 0;
    const part = n => `${num(n)}` + (tokens.prompt ? ` (${percent(n / tokens.prompt)})` : '');
    const reuse = final ? final.reuse : ran && ran.reuse, decode = final ? final.decode : ran && ran.decode;
    const place = final ? final.workers : record && record.workers;
    $('receipt').className = '';
    $('receipt').replaceChildren(pairs([
      ['state', this.state],
      ['first token', ttft ? seconds(ttft) : '…'],
      ['tokens a second', this.rate() ? short(this.rate()) : '…'],
      ['output tokens', num(this.usage ? this.usage.completion_tokens : record ? record.tokens.completion : this.pieces)],
      tokens ? ['prompt tokens', num(tokens.prompt)] : null,
      tokens ? ['· cached', part(tokens.cached)] : null,
      tokens ? ['· aligned', part(tokens.aligned)] : null,
      tokens ? ['· recomputed', part(tokens.recomputed)] : null,
      tokens ? ['· computed', part(tokens.computed)] : null,
      reuse ? ['reuse that ran', reuse] : null,
      decode ? ['decode that ran', decode] : null,
      final || ran ? ['exact', (final || ran).exact ? 'yes' : 'no'] : null,
      place && place.decode ? ['workers', `${place.prefill} → ${place.decode}`] : null,
      this.id ? ['request', el('a', {href: '#requests/' + encodeURIComponent(this.id), class: 'mono'}, this.id)] : null,
    ]));
  }
}

// Reads the request's record twice a second until the answer has ended. A key that is no operator's cannot: the
// receipt then comes with the last event alone.
const follow = async receipt => {
  while (!receipt.ended) {
    try {
      const record = await get('requests/' + encodeURIComponent(receipt.id));
      if (!receipt.ended) receipt.onRecord(record);
    } catch {
      return;
    }
    await new Promise(done => setTimeout(done, 500));
  }
};

const answer = async () => {
  const shown = el('div', {class: 'assistant'}), thought = el('div', {class: 'reasoning'}), text = el('div');
  shown.append(thought, text);
  $('messages').append(shown);
  const receipt = new Receipt(), conversation = messages;
  let said = '', final = null, usage = null, reason = '';
  const onChunk = chunk => {
    const choice = chunk.choices[0], delta = choice ? choice.delta : {};
    if (delta.reasoning_content) thought.append(delta.reasoning_content);
    if (delta.content) {
      said += delta.content;
      text.append(delta.content);
    }
    if (delta.reasoning_content || delta.content) receipt.onPiece();
    if (choice && choice.finish_reason) reason = choice.finish_reason;
    if (chunk.splice) final = chunk.splice;
    if (chunk.usage) usage = chunk.usage;
    shown.scrollIntoView({block: 'nearest'});
  };
  running = new AbortController();
  $('send').disabled = true;
  $('stop').disabled = false;
  try {
    await streamChat(body(), $('chat-key').value, running.signal, {
      begin: id => {
        receipt.id = id;
        if (id) follow(receipt);
      },
      chunk: onChunk,
    });
    receipt.onEnd(reason === 'length' ? 'ended: most tokens reached' : 'ended', final, usage);
  } catch (error) {
    const stopped = error.name === 'AbortError';
    receipt.onEnd(stopped ? 'stopped' : 'failed', final, usage);
    if (!stopped) shown.append(el('p', {class: 'bad'}, error.message));
  }
  if (said) conversation.push({role: 'assistant', content: said});
  running = null;
  $('send').disabled = false;
  $('stop').disabled = true;
};

const say = () => {
  const text = $('prompt').value.trim();
  if (!text || running) return;
  messages.push({role: 'user', content: text});
  $('messages').append(el('div', {class: 'user'}, text));
  $('prompt').value = '';
  answer();
};

export const begin = () => {
  $('say').addEventListener('submit', event => {
    event.preventDefault();
    say();
  });
  $('prompt').addEventListener('keydown', event => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    say();
  });
  $('stop').addEventListener('click', () => running && running.abort());
  $('anew').addEventListener('click', () => {
    if (running) running.abort();
    messages = [];
    $('messages').replaceChildren();
    $('receipt').replaceChildren();
  });
  $('chat-key').value = sessionStorage.getItem('chat-key') || '';
  $('chat-key').addEventListener('change', () => sessionStorage.setItem('chat-key', $('chat-key').value));
};

// `prompt`: of a link, "#chat?prompt=…": it is written into the box; only a person sends it.
export const show = (status, prompt) => {
  model = status.model.name;
  offer($('reuse-method'), status.methods.reuse);
  offer($('decode-method'), status.methods.decode);
  if (prompt) $('prompt').value = prompt;
};
