-- What did the GPU of an incident do in the minutes around its onset?
-- $incident: id of the incident, or its first characters
-- $minutes: minutes before the onset = 10
WITH incident AS (
    SELECT id, log_id, host, gpu_uuid, onset_at
    FROM current_incidents
    WHERE id LIKE $incident || '%'
    ORDER BY id
    LIMIT 1
)
SELECT
    date_trunc('minute', sample.observed_at) AS minute,
    sample.gpu_uuid,
    count(*) AS samples,
    round(avg(sample.power_draw_milliwatts) / 1000.0, 1) AS power_watts,
    max(sample.temperature_gpu_celsius) AS hottest_celsius,
    min(sample.clock_sm_megahertz) AS slowest_megahertz,
    round(100.0 * avg(CASE WHEN sample.clocks_event_reasons & 96 <> 0 THEN 1.0 ELSE 0.0 END), 1) AS throttled_percent,
    max(sample.ecc_sbe_volatile) AS ecc_sbe_volatile,
    max(sample.ecc_dbe_volatile) AS ecc_dbe_volatile
FROM gpu_samples AS sample
JOIN incident
  ON sample.log_id = incident.log_id
 AND sample.host = incident.host
 AND (incident.gpu_uuid IS NULL OR sample.gpu_uuid = incident.gpu_uuid)
WHERE sample.observed_at >= incident.onset_at - CAST($minutes || ' minutes' AS INTERVAL)
  AND sample.observed_at < incident.onset_at + INTERVAL '2 minutes'
GROUP BY minute, sample.gpu_uuid
ORDER BY sample.gpu_uuid, minute
