-- Runs one control cycle per minute from Supabase: pg_cron calls the control plane's POST /internal/cycle through pg_net.
-- Use it where no process may run all the time between cycles, or in addition to `windlass up`, to react to new tasks at once.
--
-- Before: store an operator token of Windlass (windlass tokens create supabase --role operator) and the address:
--   select vault.create_secret('wlt_…', 'windlass_token');
--   select vault.create_secret('https://windlass.example.com', 'windlass_url');
-- Run this file in the SQL editor. To remove it: select cron.unschedule('windlass-cycle');

create extension if not exists pg_cron;
create extension if not exists pg_net;

select cron.schedule(
  'windlass-cycle',
  '* * * * *',
  $$
  select net.http_post(
    url := (select decrypted_secret from vault.decrypted_secrets where name = 'windlass_url') || '/internal/cycle',
    headers := jsonb_build_object(
      'Authorization',
      'Bearer ' || (select decrypted_secret from vault.decrypted_secrets where name = 'windlass_token')
    ),
    body := '{}'::jsonb,
    timeout_milliseconds := 60000
  )
  $$
);
