"""The jars of Apache Kafka's broker, and of Spark's Kafka connector: what Maven calls each, and its sha256.

The broker stays at 4.2.1: a 4.3.1 that is killed right after an acknowledged commit may leave the transaction open for
good. The connector's own pom names a token provider of Spark's version that is in no repository; the older one has
what the connector calls.
"""

from __future__ import annotations

BROKER = """
at.yawk.lz4:lz4-java:1.10.1
    a58a84c4271e50df4c96ed916ccb7e48a869f8ed9cdcda1ad5d3d4c33b0214a3
com.dynatrace.hash4j:hash4j:0.22.0
    23028a3fd006e530bf495f551083208187cafd8f80624d048eba56442f16a50e
com.fasterxml.jackson.core:jackson-annotations:2.21
    53ca085f4a150f703f49e1aabd935bd03b43e1ea3d55d135438292af22cef56b
com.fasterxml.jackson.core:jackson-core:2.21.2
    12e8655b100267b44d0f14d01b1f5082a5105e616174dc4307be1a761e92407b
com.fasterxml.jackson.core:jackson-databind:2.21.2
    8c982f01f148d805f0aaac2339011244757e0df7c6ff8951f2fa3f433b8ed849
com.fasterxml.jackson.dataformat:jackson-dataformat-csv:2.21.2
    682f8c7977e02a42748426bf54946e32e52e2f80b84b6642801ab12bd541368a
com.fasterxml.jackson.dataformat:jackson-dataformat-yaml:2.21.2
    d25551812fa0c14f37cabaa9401e63eadcea42ce36311183af5622d5bc8a1bc7
com.fasterxml.jackson.datatype:jackson-datatype-jdk8:2.21.2
    e581bbf3fc5622d16b57366dd41e10fc56921fb202879de2ef487f87dd9b30e7
com.github.ben-manes.caffeine:caffeine:3.2.0
    ec411dfdf0c03f25218648ce89861630b71680e5858a9a7278ebac8e55cab3d7
com.github.luben:zstd-jni:1.5.6-10
    b6c3237e24b8252a5a9c3a0e1ae30ef8f323412e74bd358548b7a9e527d676df
com.google.re2j:re2j:1.8
    7b52c72156dd7f98b3237a5b35c1d34fba381b21048c89208913ad80a45dfbd7
com.typesafe.scala-logging:scala-logging_2.13:3.9.6
    0ad0c3f4d89d538b3b6c300158555e266aa69cf1b5f6522aba8b5bad238eb994
com.yammer.metrics:metrics-core:2.2.0
    6b7a14a6f34c10f8683f7b5e2f39df0f07b58c7dff0e468ebbc713905c46979c
commons-beanutils:commons-beanutils:1.11.0
    9e44ba68ec9a3f21286fa2a8bbb003b735c0f69101bb43144b79f4f8aaa74709
commons-collections:commons-collections:3.2.2
    eeeae917917144a68a741d4c0dff66aa5c5c5fd85593ff217bced3fc8ca783b8
commons-digester:commons-digester:2.1
    e0b2b980a84fc6533c5ce291f1917b32c507f62bcad64198fff44368c2196a3d
commons-logging:commons-logging:1.3.5
    6d7a744e4027649fbb50895df9497d109f98c766a637062fe8d2eabbb3140ba4
commons-validator:commons-validator:1.10.1
    ed74711a78d793ca37f6075e4a1e93d107233dfd20d0bb17e32bad88d38e56aa
net.sf.jopt-simple:jopt-simple:5.0.4
    df26cc58f235f477db07f753ba5a3ab243ebe5789d9f89ecf68dd62ea9a66c28
net.sourceforge.argparse4j:argparse4j:0.7.0
    65ceb669d88f63306c680f8088bbf765bbca72d288a61a03703000076c3d3f56
org.apache.kafka:kafka-clients:4.2.1
    6a281026416938a53c105f2d91d2807fdc83d5658452abf0ad1b6d8ab8a553c8
org.apache.kafka:kafka-coordinator-common:4.2.1
    83399c9d26875d78997032c1cde2a2073db354dbf44a93243cc942a206fb9492
org.apache.kafka:kafka-group-coordinator:4.2.1
    1ec06bf318eeea2e176d839873f34c7db7dddd174010c305de4dcfef89908d86
org.apache.kafka:kafka-group-coordinator-api:4.2.1
    0b85f8c4857f5cdc0159a17e2679f24e4ad6fa75160a4f81fe7f601d45d493dd
org.apache.kafka:kafka-metadata:4.2.1
    001b4a66383023992990d26fc7e53d0dfa7ccda3f51c79e2c32c75f4d1fe13a8
org.apache.kafka:kafka-raft:4.2.1
    4391c2f7d5c1a6a8139ed7eda67ea1ce8b39a727f5bf0372c3dd81cc4a2dbf52
org.apache.kafka:kafka-server:4.2.1
    a24df46f801ea880af31b4dbd278ac00c7723a5260cfcdb39b3f11cf10f233a1
org.apache.kafka:kafka-server-common:4.2.1
    8c10d0ca99fe4585797814dfea4ee43a4cf6bb38a847f7bdcb738527ee9d24bb
org.apache.kafka:kafka-share-coordinator:4.2.1
    7401ab67a77e1743c5c3c1ed2d4d0f97f9ea9de96e6ff47ce11c0d75ced54cc0
org.apache.kafka:kafka-storage:4.2.1
    c12d9f25f08260a329eb40615ffbc92e892314838b798e1d4d19f28341a1076d
org.apache.kafka:kafka-storage-api:4.2.1
    5b7ec3b876ba3c1347e589bcf07b61b04f4226a69c39fac90735d0f152859edc
org.apache.kafka:kafka-tools-api:4.2.1
    ecb0e8d68bfd3750695bf303021206e951ccde4f1efbd6910def4c86f3bae2f0
org.apache.kafka:kafka-transaction-coordinator:4.2.1
    b2d957c7919519d6330c38e8c8e573864ef1afdfee30f60aa53ad89d50d3ac1b
org.apache.kafka:kafka_2.13:4.2.1
    1feebfe64c4077641aa915e8d77b6a1ae702dcbee80a88d0c3d5a4077b49fa0b
org.apache.logging.log4j:log4j-api:2.25.4
    c4b642a7f047275215de117e0e3847eb2c7711d84a0aa7433e7b3c096daf341d
org.apache.logging.log4j:log4j-core:2.25.4
    10fee2c0485d54fa44ee75d314f6295508f7b932281873db61a91b88073200e6
org.apache.logging.log4j:log4j-slf4j-impl:2.25.4
    7ac68a0afcc83d54f48d116d79370a43f0a2a6b71b5c1d6dda943bb6a95ddbaa
org.bitbucket.b_c:jose4j:0.9.6
    7314af50cde9c99e8eaf43eee617a23edcc6bb43036221064355094999d837ef
org.hdrhistogram:HdrHistogram:2.2.2
    22d1d4316c4ec13a68b559e98c8256d69071593731da96136640f864fa14fad8
org.jspecify:jspecify:1.0.0
    1fad6e6be7557781e4d33729d49ae1cdc8fdda6fe477bb0cc68ce351eafdfbab
org.pcollections:pcollections:4.0.2
    2bbeef5797a241300c4f7513cd546239629ed7deda4fc0c31df90bb95f5f13ef
org.scala-lang:scala-library:2.13.17
    b7822c4225243215f185925724a6edff92cf18777a136cc738276c4446fac76c
org.scala-lang:scala-reflect:2.13.17
    734533897bcfabe7a6e7fa09dbee165b257b0396e14e8a57c75111db8e04bb98
org.slf4j:slf4j-api:1.7.36
    d3ef575e3e4979678dc01bf1dcce51021493b4d11fb7f1be8ad982877c16a1c0
org.xerial.snappy:snappy-java:1.1.10.7
    4c766cb3f855415ee734b2392949a0b6f12a60879334a74518deaf6270d32e36
org.yaml:snakeyaml:2.5
    e6682acf1ace77508ef13649cbf4f8d09d2cf5457bdb61d25ffb6ac0233d78dd
"""

#: Kafka's own command line, for a reader that is not ours; it needs the broker's jars, too.
TOOLS = """
org.apache.kafka:kafka-tools:4.2.1
    28142ee12baf9e7d46e4784c612aed7a8565e80462616b0ddfb4e2f8d7837e53
"""

CONNECTOR = """
org.apache.commons:commons-pool2:2.13.1
    f77a5060d6936a9144023584232f9de3f2248f1abfe156e9d31795f18770674f
org.apache.kafka:kafka-clients:3.9.2
    014b4ef36884478a932641818b080c36a8f8e2e92dc771e800c9d2694f4f83d8
org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0
    64539c45e5d39f7ddb747312c239f38f5208d08c1a0ddf7d70beb2fbd9373705
org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0
    f2be3b76f9e6cbe63379d4e4e0dc14f59dbf056ae2ad16ff15ac108004c86767
"""
