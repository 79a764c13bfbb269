// Numbers as people read them.

export const num = (value, digits = 0) => Number(value).toLocaleString('en', {maximumFractionDigits: digits});

// Three digits that matter: 0.042, 1.25, 37.4, 1,250.
export const short = value => num(value, value === 0 ? 0 : Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)))));

export const seconds = s =>
  s === 0 ? '0 ms' : s < 1e-4 ? short(s * 1e6) + ' µs' : s < 1 ? short(s * 1000) + ' ms' : s < 120 ? num(s, 1) + ' s' : s < 7200 ? num(s / 60) + ' min' : num(s / 3600, 1) + ' h';

export const percent = (share, digits = 0) => num(100 * share, digits) + ' %';

export const bytes = count => {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; ++unit) count /= 1024;
  return num(count, unit ? 1 : 0) + ' ' + units[unit];
};

// "5fe39c01…" for an id that a program made; what a client chose stays as long as it can be read.
export const shortId = id => (/^[0-9a-f]{24,}$/.test(id) ? id.slice(0, 8) + '…' : id.length > 28 ? id.slice(0, 26) + '…' : id);

export const clock = unixMs => new Date(unixMs).toLocaleTimeString('en-GB');

// "−12 min" for a moment that many seconds ago.
export const ago = s => (s < 1 ? 'now' : s < 90 ? `−${num(s)} s` : `−${num(s / 60, 1)} min`);
