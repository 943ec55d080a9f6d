"""A shop: orders, receipts by mail, and a warehouse that hears of each order by webhook.

Read in this order: models, jobs, checkout (the one transaction), receiver (the other end), api. The rest runs it:
`python -m examples.shop.demo`.
"""
