-- Shared volumes of fleets, and what they cost. The ledger of machines does not include them: they belong to no worker.

-- One row for each size that a volume had, so a volume has few rows. It is billed by the second from from_at until
-- until_at, the last time that it was seen with this size.
create table windlass.volume_sizes (
  volume_id text not null,
  fleet text not null,
  size_gb integer not null check (size_gb >= 0),
  price_micros_per_hour bigint not null check (price_micros_per_hour >= 0),
  currency text not null,
  from_at timestamptz not null,
  until_at timestamptz not null,
  primary key (volume_id, fleet, from_at)
);

-- A cycle has read a fleet's volume. The time since it was last seen counts at the size that it had then.
create function windlass_internal.record_volume(
  p_fleet text, p_volume_id text, p_size_gb integer, p_price_micros_per_hour bigint, p_currency text
) returns void
language plpgsql
as $$
declare
  v_now timestamptz := windlass.now();
  v_last windlass.volume_sizes;
begin
  select * into v_last from windlass.volume_sizes v
  where v.fleet = p_fleet and v.volume_id = p_volume_id
  order by v.from_at desc limit 1 for update;
  if found then
    update windlass.volume_sizes v set until_at = greatest(v.until_at, v_now)
    where (v.volume_id, v.fleet, v.from_at) = (v_last.volume_id, v_last.fleet, v_last.from_at);
    if (v_last.size_gb, v_last.price_micros_per_hour) = (p_size_gb, p_price_micros_per_hour) then
      return;
    end if;
  end if;
  insert into windlass.volume_sizes (
    volume_id, fleet, size_gb, price_micros_per_hour, currency, from_at, until_at
  )
  values (p_volume_id, p_fleet, p_size_gb, p_price_micros_per_hour, p_currency, v_now, v_now)
  on conflict do nothing;
end
$$;
