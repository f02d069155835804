import { handle } from "./index.ts";

const SERVICE = `Bearer x.${btoa(JSON.stringify({ role: "service_role" }))}.y`;
const END_USER = `Bearer x.${btoa(JSON.stringify({ role: "authenticated" }))}.y`;

function post(authorization: string): Request {
  return new Request("http://localhost/", { method: "POST", headers: { Authorization: authorization } });
}

function check(found: unknown, expected: unknown): void {
  if (found !== expected) throw new Error(`${found} is not ${expected}`);
}

Deno.test("only the service role runs a cycle", async () => {
  check((await handle(post(END_USER), { url: "http://127.0.0.1:1", token: "t" })).status, 403);
  check((await handle(post("nonsense"), { url: "http://127.0.0.1:1", token: "t" })).status, 403);
});

Deno.test("missing secrets are named", async () => {
  const response = await handle(post(SERVICE), {});
  check(response.status, 500);
  check((await response.json()).error, "set the secrets WINDLASS_URL and WINDLASS_TOKEN");
});

Deno.test("the cycle's response is passed on with the operator's token", async () => {
  const seen: string[] = [];
  const server = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen: () => {} }, (request) => {
    seen.push(`${request.method} ${new URL(request.url).pathname} ${request.headers.get("Authorization")}`);
    return Response.json({ is_leader: true });
  });
  try {
    const response = await handle(post(SERVICE), { url: `http://127.0.0.1:${server.addr.port}/`, token: "wlt_1" });
    check(response.status, 200);
    check((await response.json()).is_leader, true);
    check(seen.join(), "POST /internal/cycle Bearer wlt_1");
  } finally {
    await server.shutdown();
  }
});

Deno.test("a control plane that does not answer is a 502", async () => {
  check((await handle(post(SERVICE), { url: "http://127.0.0.1:1", token: "t" })).status, 502);
});
