// Calls of the router. The key is kept for this tab only (sessionStorage) and sent as a bearer token.

let key = sessionStorage.getItem('key') || '';
export const setKey = value => {
  key = value;
  sessionStorage.setItem('key', value);
};

const authorization = own => (own || key ? {authorization: 'Bearer ' + (own || key)} : {});

// Throws an Error with the router's message and `status`.
const checked = async answer => {
  if (answer.ok) return answer;
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // A proxy's answer, perhaps: the status has to do.
  }
  throw Object.assign(new Error(message), {status: answer.status});
};

export const get = async path => (await checked(await fetch('/control/v1/' + path, {headers: authorization()}))).json();

// The router takes JSON only here: a form of another page cannot send it (browser_guard.h).
export const post = async (path, body) =>
  (await checked(await fetch('/control/v1/' + path, {
    method: 'POST',
    headers: {'content-type': 'application/json', ...authorization()},
    body: JSON.stringify(body),
  }))).json();

// The data of server-sent events, without the last one, [DONE].
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data: ')) continue;
      if (line === 'data: [DONE]') return;
      yield JSON.parse(line.slice(6));
    }
  }
}

// Streams a chat completion. Calls on.begin(request id), on.chunk(chunk) for each event; returns at the end.
export const streamChat = async (body, ownKey, signal, on) => {
  const answer = await checked(await fetch('/v1/chat/completions', {
    method: 'POST',
    headers: {'content-type': 'application/json', ...authorization(ownKey)},
    body: JSON.stringify(body),
    signal,
  }));
  on.begin(answer.headers.get('x-request-id'));
  for await (const chunk of events(answer.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    on.chunk(chunk);
  }
};
