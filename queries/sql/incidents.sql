-- Which incidents are there, newest last?
-- $state: open, resolved or any = any
-- $kind: a kind, or any = any
-- $host: a host, or any = any
-- $log: a log id, or any = any
SELECT
  id, kind, severity, state, host, feed, gpu_index, gpu_uuid, code, onset_at, end_at, count, summary, explains, actions
FROM current_incidents
WHERE ($state = 'any' OR state = $state)
  AND ($kind = 'any' OR kind = $kind)
  AND ($host = 'any' OR host = $host)
  AND ($log = 'any' OR log_id = $log)
ORDER BY onset_at, kind, host, gpu_uuid
