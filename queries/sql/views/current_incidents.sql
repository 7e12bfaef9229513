-- The newest revision of every incident.
SELECT *
FROM incidents
QUALIFY row_number() OVER (PARTITION BY id ORDER BY revision DESC) = 1
