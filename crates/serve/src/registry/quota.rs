//! Limits what all clients together, and each client, may hold at a time.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex};

use crate::unpoisoned::lock;

/// A number of things, such as connections, and how many of them each client holds.
#[derive(Debug)]
pub(super) struct Quota {
    total: usize,
    each: usize,
    held: Mutex<BTreeMap<IpAddr, usize>>,
}

/// One of the things. It is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    quota: Arc<Quota>,
    client: IpAddr,
}

impl Quota {
    /// Allows `total` things, and `each` of them for one client.
    pub(super) fn new(total: usize, each: usize) -> Arc<Self> {
        Arc::new(Self { total, each, held: Mutex::default() })
    }

    /// Takes one of the things. `None` if there are too many.
    pub(super) fn take(self: &Arc<Self>, address: IpAddr) -> Option<Held> {
        let client = client_of(address);
        let mut held = lock(&self.held);
        let total: usize = held.values().sum();
        let own = held.get(&client).copied().unwrap_or_default();
        // All clients behind a proxy on this host have its loopback address.
        let is_within = client.is_loopback() || own < self.each;
        if total >= self.total || !is_within {
            return None;
        }
        held.insert(client, own + 1);
        Some(Held { quota: Arc::clone(self), client })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut held = lock(&self.quota.held);
        match held.get_mut(&self.client) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(held.remove(&self.client)),
        }
    }
}

/// Returns the address that counts as one client. A host usually has a whole IPv6 network of 64 bits.
fn client_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_and_all_clients_are_limited() {
        let address = |text: &str| text.parse().unwrap();
        let quota = Quota::new(5, 2);
        let first = quota.take(address("10.0.0.1")).unwrap();
        let _second = quota.take(address("::ffff:10.0.0.1")).unwrap();
        assert!(quota.take(address("10.0.0.1")).is_none(), "one client has two");
        drop(first);
        let _third = quota.take(address("10.0.0.1")).unwrap();
        let _fourth = quota.take(address("2001:db8::1")).unwrap();
        let _fifth = quota.take(address("2001:db8::ffff:1")).unwrap();
        assert!(quota.take(address("2001:db8::2")).is_none(), "the same network");
        let last = quota.take(address("2001:db8:0:1::1")).unwrap();
        assert!(quota.take(address("10.0.0.9")).is_none(), "all have five");
        drop(last);
        let _again = quota.take(address("10.0.0.9")).unwrap();
        let local = Quota::new(3, 1);
        let _many = [(); 3].map(|()| local.take(address("127.0.0.1")).unwrap());
        assert!(local.take(address("127.0.0.1")).is_none());
    }
}
