-- Which GPUs lost the most time to heat, and which only to their power cap?
-- $log: a log id, or any = any
SELECT
    host,
    gpu_index,
    gpu_uuid,
    count(*) AS samples,
    round(100.0 * avg(CASE WHEN clocks_event_reasons & 96 <> 0 THEN 1.0 ELSE 0.0 END), 2) AS heat_percent,
    round(100.0 * avg(CASE WHEN clocks_event_reasons & 4 <> 0 THEN 1.0 ELSE 0.0 END), 2) AS power_cap_percent,
    max(temperature_gpu_celsius) AS hottest_celsius,
    round(avg(clock_sm_megahertz), 0) AS mean_megahertz
FROM gpu_samples
WHERE clocks_event_reasons IS NOT NULL
  AND ($log = 'any' OR log_id = $log)
GROUP BY host, gpu_index, gpu_uuid
ORDER BY heat_percent DESC, power_cap_percent DESC, hottest_celsius DESC, gpu_uuid
LIMIT 10
