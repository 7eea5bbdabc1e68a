//! What ranks tell rank 0 about themselves, and what it tells all of them.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use shardwright_core::Rank;
use shardwright_wire::Value;

use crate::transport::PeerInfo;
use shardwright_buffers::Offer;

/// What a rank says when it joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Registration {
    pub(super) version: String,
    pub(super) fingerprint: String,
    /// What it does not have and a job needs; empty where nothing is missing.
    pub(super) lacks: String,
    pub(super) row: Row,
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) peer: PeerInfo,
    pub(super) address: SocketAddr,
    /// Its persistent buffer, for ranks of the same host.
    pub(super) offer: Option<Offer>,
    /// Where its transports are found, by their names.
    pub(super) addresses: BTreeMap<String, Vec<u8>>,
}

impl Registration {
    pub(super) fn to_value(&self) -> Value {
        let texts = [&self.version, &self.fingerprint, &self.lacks];
        let mut fields: Vec<Value> = texts.into_iter().cloned().map(Value::Str).collect();
        fields.push(self.row.to_value());
        Value::Tuple(fields)
    }

    pub(super) fn from_value(value: &Value) -> Option<Self> {
        let Value::Tuple(fields) = value else {
            return None;
        };
        let [
            Value::Str(version),
            Value::Str(fingerprint),
            Value::Str(lacks),
            row,
        ] = fields.as_slice()
        else {
            return None;
        };
        Some(Self {
            version: version.clone(),
            fingerprint: fingerprint.clone(),
            lacks: lacks.clone(),
            row: Row::from_value(row)?,
        })
    }
}

impl Row {
    pub(super) fn to_value(&self) -> Value {
        Value::Tuple(vec![
            Value::Int(i64::from(self.peer.rank.0)),
            Value::Str(self.peer.host.clone()),
            Value::Int(i64::from(self.peer.pid)),
            Value::Str(self.address.ip().to_string()),
            Value::Int(i64::from(self.address.port())),
            self.offer.as_ref().map_or(Value::None, offer_to_value),
            Value::List(self.addresses.iter().map(address_to_value).collect()),
        ])
    }

    pub(super) fn from_value(value: &Value) -> Option<Self> {
        let Value::Tuple(fields) = value else {
            return None;
        };
        let [
            Value::Int(rank),
            Value::Str(host),
            Value::Int(pid),
            Value::Str(ip),
            Value::Int(port),
            offer,
            Value::List(addresses),
        ] = fields.as_slice()
        else {
            return None;
        };
        let ip: IpAddr = ip.parse().ok()?;
        let peer = PeerInfo {
            rank: Rank(u32::try_from(*rank).ok()?),
            host: host.clone(),
            pid: u32::try_from(*pid).ok()?,
        };
        Some(Self {
            peer,
            address: SocketAddr::new(ip, u16::try_from(*port).ok()?),
            offer: match offer {
                Value::None => None,
                offer => Some(offer_from_value(offer)?),
            },
            addresses: addresses
                .iter()
                .map(address_from_value)
                .collect::<Option<_>>()?,
        })
    }

    /// A table with a row for every rank in order, and nothing else.
    pub(super) fn table_from_value(value: &Value, world: u32) -> Option<Vec<Self>> {
        let Value::List(rows) = value else {
            return None;
        };
        let rows: Vec<Self> = rows.iter().map(Self::from_value).collect::<Option<_>>()?;
        let ranks = rows.iter().map(|row| row.peer.rank.0);
        ranks.eq(0..world).then_some(rows)
    }
}

fn address_to_value((name, address): (&String, &Vec<u8>)) -> Value {
    Value::Tuple(vec![
        Value::Str(name.clone()),
        Value::Bytes(address.clone()),
    ])
}

fn address_from_value(value: &Value) -> Option<(String, Vec<u8>)> {
    let Value::Tuple(fields) = value else {
        return None;
    };
    let [Value::Str(name), Value::Bytes(address)] = fields.as_slice() else {
        return None;
    };
    Some((name.clone(), address.clone()))
}

fn offer_to_value(offer: &Offer) -> Value {
    Value::Tuple(vec![
        Value::Int(i64::from(offer.pid)),
        Value::Int(i64::from(offer.fd)),
        Value::Int(offer.bytes.cast_signed()),
        Value::Bytes(offer.token.to_vec()),
    ])
}

fn offer_from_value(value: &Value) -> Option<Offer> {
    let Value::Tuple(fields) = value else {
        return None;
    };
    let [
        Value::Int(pid),
        Value::Int(fd),
        Value::Int(bytes),
        Value::Bytes(token),
    ] = fields.as_slice()
    else {
        return None;
    };
    Some(Offer {
        pid: u32::try_from(*pid).ok()?,
        fd: i32::try_from(*fd).ok()?,
        bytes: u64::try_from(*bytes).ok()?,
        token: token.as_slice().try_into().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(rank: u32) -> Row {
        let peer = PeerInfo {
            rank: Rank(rank),
            host: "node-a".to_owned(),
            pid: 77,
        };
        Row {
            peer,
            address: "[::1]:4242".parse().unwrap(),
            offer: (rank == 1).then_some(Offer {
                pid: 77,
                fd: 9,
                bytes: 1 << 30,
                token: [7; 16],
            }),
            addresses: (0..rank)
                .map(|at| (at.to_string(), vec![1; at as usize]))
                .collect(),
        }
    }

    #[test]
    fn registrations_and_tables_come_back_equal() {
        let registration = Registration {
            version: "0.1.0".to_owned(),
            fingerprint: "seed=1".to_owned(),
            lacks: "descriptors".to_owned(),
            row: row(3),
        };
        assert_eq!(
            Registration::from_value(&registration.to_value()),
            Some(registration)
        );
        let table = Value::List(vec![row(0).to_value(), row(1).to_value()]);
        assert_eq!(Row::table_from_value(&table, 2), Some(vec![row(0), row(1)]));
        assert_eq!(Row::table_from_value(&table, 3), None);
        assert_eq!(
            Row::table_from_value(&Value::List(vec![row(1).to_value()]), 1),
            None
        );
    }
}
