{{ config(materialized="incremental", incremental_strategy="delete+insert", unique_key="day") }}

select day, shop, amount, amount / sum(amount) over (partition by day) as share
from {{ source("lake", "revenue") }}
where day = date '{{ var("day") }}'
