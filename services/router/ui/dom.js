// Elements. Text is always set as text: nothing that a client or a worker says is parsed as HTML.

export const $ = id => document.getElementById(id);

// Attributes by name; `on` has listeners by event, `data` data attributes; null and false are left out.
const decorate = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === 'data') Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined));
  return node;
};
export const el = (tag, attributes = {}, ...children) => decorate(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  decorate(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

// A bar of parts: [{share, tone}]. The policy of the page forbids style attributes, so widths are set as properties.
export const shareBar = (parts, wide = false) => {
  const bar = el('span', {class: wide ? 'share wide' : 'share'});
  for (const {share, tone, title} of parts) {
    const part = el('i', {class: tone, title});
    part.style.width = Math.max(0, Math.min(100, 100 * share)) + '%';
    bar.append(part);
  }
  return bar;
};

export const pairs = entries =>
  el('dl', {class: 'pairs'}, entries.filter(entry => entry !== null).flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]));

// A cell is a string, a number (right-aligned), or {text, tone, right, share, title, href, mono, wide, node}. A wide one
// has a line of its own where rows are cards.
const fillCell = (td, cell) => {
  const c = typeof cell === 'object' ? cell : {text: cell};
  const number = typeof c.text === 'number';
  td.className = [number || c.right ? 'n' : '', c.tone || '', c.mono ? 'mono' : '', c.wide ? 'wide' : ''].join(' ').trim();
  if (c.title) td.title = c.title;
  if (c.node) return td.replaceChildren(c.node);
  const text = number ? c.text.toLocaleString('en', {maximumFractionDigits: 1}) : c.text;
  td.replaceChildren(c.href ? el('a', {href: c.href}, text) : text);
  if (c.share !== undefined) td.append(' ', shareBar([{share: c.share}]));
};

// Decides whether a cell must be drawn again; a node says it by `same`.
const signature = cell => (typeof cell === 'object' && cell.node ? 'node ' + cell.same : JSON.stringify(cell));

// Shows rows ([{key, cells}]) below `head`. A row that was there keeps its elements, and so the focus of a button in it.
export const fillTable = (table, head, rows, empty) => {
  if (!table.tHead) {
    table.classList.add('cards');
    table.append(el('thead', {}, el('tr')), el('tbody'));
  }
  const aligned = rows.length ? rows[0].cells.map(c => typeof c === 'number' || (typeof c === 'object' && c.right)) : [];
  table.tHead.rows[0].replaceChildren(...head.map((name, i) => el('th', {scope: 'col', class: aligned[i] ? 'n' : null}, name)));
  const body = table.tBodies[0];
  const old = new Map([...body.rows].map(tr => [tr.dataset.key, tr]));
  const wanted = rows.map(row => {
    const tr = old.get(row.key) || el('tr', {data: {key: row.key}}, row.cells.map((_, i) => el('td', {data: {label: head[i]}})));
    row.cells.forEach((cell, i) => {
      const sign = signature(cell), td = tr.cells[i];
      if (td.drawn === sign) return;
      td.drawn = sign;
      fillCell(td, cell);
    });
    return tr;
  });
  if (!rows.length) wanted.push(el('tr', {data: {key: ''}}, el('td', {class: 'dim', colspan: head.length}, empty)));
  // Moves only the rows that stand in another place: an element that is moved loses the focus.
  wanted.forEach((tr, i) => {
    if (body.rows[i] !== tr) body.insertBefore(tr, body.rows[i] || null);
  });
  while (body.rows.length > wanted.length) body.lastChild.remove();
};
