// One chart of the overview: lines or stacked areas over time, as SVG. A cross hair follows the pointer, or the arrow
// keys; the values are also there as a sentence and as a table.
import {el, svg} from './dom.js';
import {ago, clock} from './format.js';
import {clip, runs, stack, ticks, timeTicks} from './series.js';

const kHeight = 170, kLeft = 58, kRight = 10, kTop = 8, kBottom = 20;
const kTableRows = 60;

export class Chart {
  constructor(spec) {
    this.spec = spec;
    this.at = null;  // sample under the cross hair
    this.legends = spec.lines.map(line => el('span', {class: 'legend'}));
    this.svg = svg('svg', {role: 'img', tabindex: 0, 'aria-label': spec.title, on: {
      pointermove: event => this.point(this.nearest(event)),
      pointerdown: event => this.point(this.nearest(event)),
      pointerleave: () => this.point(null),
      blur: () => this.point(null),
      keydown: event => this.key(event),
    }});
    this.tip = el('div', {class: 'tip', hidden: true});
    this.plot = el('div', {class: 'plot'}, this.svg, this.tip);
    this.values = el('div');
    this.details = el('details', {on: {toggle: () => this.table()}}, el('summary', {}, 'Values'), this.values);
    this.node = el('figure', {id: 'chart-' + spec.id}, el('figcaption', {}, el('b', {}, spec.title), this.legends), this.plot, this.details);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  // `span`: seconds that are shown.
  update(history, span) {
    // The cross hair stays at its time.
    const time = this.at === null ? null : this.data.times[this.at];
    this.data = clip(history, this.spec.lines, span);
    this.at = time === null || !this.data.times.length ? null : this.closest(t => Math.abs(t - time));
    this.draw();
    this.table();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!this.data || !width) return;
    const {t0, t1, times, values, breaks} = this.data, {lines, stacked, floor, top, whole, format} = this.spec;
    const shown = stacked ? stack(values) : values;
    const most = top || Math.max(floor, ...shown.flat().filter(v => v !== null));
    const marks = ticks(most, 3, whole), high = marks[marks.length - 1];
    this.x = t => kLeft + ((t - t0) / (t1 - t0)) * (width - kLeft - kRight);
    this.y = v => kTop + (1 - v / high) * (kHeight - kTop - kBottom);
    const parts = [];
    for (const mark of marks) {
      const y = this.y(mark);
      parts.push(svg('line', {class: mark ? 'grid' : 'axis', x1: kLeft, x2: width - kRight, y1: y, y2: y}),
                 svg('text', {x: kLeft - 6, y: y + 4, 'text-anchor': 'end'}, format(mark)));
    }
    for (const s of timeTicks((t1 - t0) / 1e3)) {
      const x = this.x(t1 - s * 1e3);
      parts.push(svg('text', {x, y: kHeight - 5, 'text-anchor': s === 0 ? 'end' : x < kLeft + 20 ? 'start' : 'middle'}, ago(s)));
    }
    // The largest sum first: what is drawn later lies on top of it.
    const order = lines.map((_, i) => i);
    for (const i of stacked ? order.reverse() : order)
      for (const run of runs(values[i], breaks)) parts.push(...this.stroke(shown[i], run, lines[i], stacked ? shown[i - 1] : null));
    this.cross = svg('g');
    this.svg.setAttribute('viewBox', `0 0 ${width} ${kHeight}`);
    this.svg.replaceChildren(...parts, this.cross);
    this.svg.setAttribute('aria-label', this.sentence());
    this.svg.dataset.points = times.length;
    lines.forEach((line, i) => {
      const last = values[i].findLast(v => v !== null);
      this.legends[i].replaceChildren(el('i', {class: line.tone}), `${line.name} ${last === undefined ? '–' : format(last)}`);
    });
    this.point(this.at);
  }

  // A run of one sample is a dot, in a stack a thin column of its period.
  stroke(line, [begin, end], {tone}, below) {
    const at = i => `${this.x(this.data.times[i]).toFixed(1)},${this.y(line[i]).toFixed(1)}`;
    const places = Array.from({length: end - begin}, (_, k) => begin + k);
    if (!this.spec.stacked)
      return places.length > 1 ? [svg('polyline', {class: 'line ' + tone, points: places.map(at).join(' ')})]
                               : [svg('circle', {class: 'dot ' + tone, r: 3, cx: this.x(this.data.times[begin]), cy: this.y(line[begin])})];
    const base = i => `${this.x(this.data.times[i]).toFixed(1)},${this.y(below ? below[i] : 0).toFixed(1)}`;
    return [svg('polygon', {class: 'area ' + tone, points: [...places.map(at), ...places.reverse().map(base)].join(' ')})];
  }

  nearest(event) {
    if (!this.data || !this.data.times.length) return null;
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    return this.closest(t => Math.abs(this.x(t) - x));
  }

  // The sample whose time has the least distance.
  closest(distance) {
    const distances = this.data.times.map(distance);
    return distances.indexOf(Math.min(...distances));
  }

  key(event) {
    const count = this.data ? this.data.times.length : 0, step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === 'Escape') this.point(null);
    if (!step || !count) return;
    event.preventDefault();
    this.point(this.at === null ? count - 1 : Math.max(0, Math.min(count - 1, this.at + step)));
  }

  // Puts the cross hair on a sample; null takes it away.
  point(at) {
    this.at = at;
    this.tip.hidden = at === null;
    if (!this.cross) return;
    if (at === null) return this.cross.replaceChildren();
    const {times, values} = this.data, {lines, format, stacked} = this.spec, x = this.x(times[at]);
    const shown = stacked ? stack(values) : values;
    const dots = lines.map((line, i) => values[i][at] === null ? null : svg('circle', {class: 'dot ' + line.tone, r: 4, cx: x, cy: this.y(shown[i][at])}));
    this.cross.replaceChildren(svg('line', {class: 'cross', x1: x, x2: x, y1: kTop, y2: kHeight - kBottom}), ...dots.filter(d => d));
    this.tip.replaceChildren(el('b', {}, clock(times[at])), ...lines.map((line, i) =>
      el('div', {class: 'legend'}, el('i', {class: line.tone}), `${line.name} ${values[i][at] === null ? '–' : format(values[i][at])}`)));
    const left = x > this.plot.clientWidth / 2;
    this.tip.style.left = left ? '' : x + 10 + 'px';
    this.tip.style.right = left ? this.plot.clientWidth - x + 10 + 'px' : '';
  }

  sentence() {
    const {lines, title, format} = this.spec;
    const said = lines.map((line, i) => {
      const seen = this.data.values[i].filter(v => v !== null);
      return seen.length ? `${line.name} ${format(seen[seen.length - 1])}, at most ${format(Math.max(...seen))}` : `${line.name}: nothing yet`;
    });
    return `${title}. ${said.join('; ')}.`;
  }

  // The latest samples first; made only while it is open.
  table() {
    if (!this.details.open || !this.data) return;
    const {times, values} = this.data, {lines, format} = this.spec;
    const rows = times.map((t, i) => el('tr', {}, el('td', {}, clock(t)),
      values.map(line => el('td', {class: 'n'}, line[i] === null ? '–' : format(line[i]))))).reverse().slice(0, kTableRows);
    this.values.replaceChildren(el('table', {}, el('thead', {}, el('tr', {}, el('th', {scope: 'col'}, 'time'),
      lines.map(line => el('th', {scope: 'col', class: 'n'}, line.name)))), el('tbody', {}, rows)));
  }
}
