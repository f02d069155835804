-- PUBLIC gets nothing. grants.sql has the privileges of producers and workers.
revoke all on schema windlass, windlass_internal from public;
revoke execute on all functions in schema windlass_internal from public;
