// An Edge Function that runs one control cycle: POST /functions/v1/windlass-cycle with a service-role key.
// Secrets: supabase secrets set WINDLASS_URL=https://windlass.example.com WINDLASS_TOKEN=wlt_…
// Deploy:  supabase functions deploy windlass-cycle
// The token has role operator. Supabase verifies the caller's JWT before this code runs; only the service role passes.

const TIMEOUT_MS = 60_000;

function roleOf(request: Request): string | undefined {
  const [, claims] = (request.headers.get("Authorization") ?? "").replace(/^Bearer /, "").split(".");
  if (claims === undefined) return undefined;
  try {
    return JSON.parse(atob(claims.replaceAll("-", "+").replaceAll("_", "/"))).role;
  } catch {
    return undefined;
  }
}

export async function handle(request: Request, settings: { url?: string; token?: string }): Promise<Response> {
  if (request.method !== "POST") return Response.json({ error: "use POST" }, { status: 405 });
  if (roleOf(request) !== "service_role") {
    return Response.json({ error: "only the service role may run a cycle" }, { status: 403 });
  }
  if (!settings.url || !settings.token) {
    return Response.json({ error: "set the secrets WINDLASS_URL and WINDLASS_TOKEN" }, { status: 500 });
  }
  try {
    const response = await fetch(`${settings.url.replace(/\/+$/, "")}/internal/cycle`, {
      method: "POST",
      headers: { Authorization: `Bearer ${settings.token}` },
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    return new Response(await response.text(), {
      status: response.status,
      headers: { "Content-Type": response.headers.get("Content-Type") ?? "application/json" },
    });
  } catch (error) {
    const reason = error instanceof Error ? error.name : "unknown error";
    return Response.json({ error: `the control plane did not answer (${reason})` }, { status: 502 });
  }
}

if (import.meta.main) {
  Deno.serve((request) =>
    handle(request, { url: Deno.env.get("WINDLASS_URL"), token: Deno.env.get("WINDLASS_TOKEN") })
  );
}
