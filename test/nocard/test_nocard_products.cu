// Products of the stand-in for cuBLASLt (test/nocard/) are plain sums, and only those that the card supports
// are accepted.
#include "test/nocard/product_testing.h"

TEST_CASE("products are plain sums, for each type, layout and epilogue, by each algorithm") {
    std::vector<Product> products;
    for (bool ta : {false, true})
        for (bool tb : {false, true})
            for (cudaDataType d : {CUDA_R_16BF, CUDA_R_32F})
                for (float beta : {0.0f, 1.0f})
                    products.push_back(
                        {24, 19, 264, ta, tb, CUDA_R_16BF, CUDA_R_16BF, d, CUBLASLT_EPILOGUE_DEFAULT, beta});
    for (auto epilogue :
         {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU,
          CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADA, CUBLASLT_EPILOGUE_BGRADB}) {
        products.push_back({24, 19, 264, true, false, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, epilogue});
        products.push_back({16, 9, 41, false, true, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, epilogue});
    }
    for (auto [a, b] : {std::pair(CUDA_R_8F_E4M3, CUDA_R_8F_E4M3), {CUDA_R_8F_E4M3, CUDA_R_8F_E5M2}})
        for (cudaDataType d : {CUDA_R_16BF, CUDA_R_32F})
            for (bool fast : {false, true})
                if (card_has_fp8())
                    products.push_back(
                        {32, 19, 272, true, false, a, b, d, CUBLASLT_EPILOGUE_DEFAULT, 0, fast});
    for (const Product& p : products) {
        CAPTURE(p.epilogue);
        CAPTURE((int)p.a_type);
        CAPTURE((int)p.d_type);
        ProductTest first(p);
        REQUIRE(first.find() == CUBLAS_STATUS_SUCCESS);
        for (size_t i = 0; i < first.found.size(); i++) {
            ProductTest test(p);
            test.find();
            REQUIRE(test.run(i) == CUBLAS_STATUS_SUCCESS);
            double limit = p.d_type == CUDA_R_16BF ? 0.3
                           : is_fp8(p.a_type)      ? 0.02
                                                   : 1e-4;  // the numbers reach 50
            CHECK(test.error() < limit);
        }
    }
}

TEST_CASE(
    "algorithms differ by their bytes and by the order of their sums, and need workspaces as they say") {
    Product p = {32, 16, 512, true, false, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_32F};
    ProductTest test(p);
    REQUIRE(test.find() == CUBLAS_STATUS_SUCCESS);
    size_t all = test.found.size();
    REQUIRE(all >= 4);
    std::vector<std::vector<double>> results;
    bool differ = false;
    for (size_t i = 0; i < all; i++) {
        REQUIRE(test.run(i) == CUBLAS_STATUS_SUCCESS);
        results.push_back(test.results());
        differ = differ || results[i] != results[0];
        for (size_t j = 0; j < i; j++)
            CHECK(memcmp(&test.found[i].algo, &test.found[j].algo, sizeof test.found[i].algo) != 0);
    }
    CHECK(differ);
    p.workspace = 1;
    ProductTest without(p);
    REQUIRE(without.find() == CUBLAS_STATUS_SUCCESS);
    CHECK(without.found.size() < all);
    for (auto& result : without.found) CHECK(result.workspaceSize <= 1);
    CHECK(without.find(2) == CUBLAS_STATUS_SUCCESS);  // pointers of any alignment
    CHECK(without.found.size() == 1);
    // an algorithm of another problem
    ProductTest other({32, 16, 256, true, false, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_32F});
    other.found = test.found;
    CHECK(other.run(0) == CUBLAS_STATUS_NOT_SUPPORTED);
}

TEST_CASE("products that the library does not have are refused") {
    auto status = [](const Product& p) { return ProductTest(p).find(); };
    const auto e4m3 = CUDA_R_8F_E4M3, e5m2 = CUDA_R_8F_E5M2;
    cudaDeviceProp card;
    require(cudaGetDeviceProperties(&card, 0));
    auto fp8 = [&](int m, int k, bool ta, bool tb, cudaDataType a, cudaDataType b) {
        return status({m, 16, k, ta, tb, a, b, CUDA_R_16BF});
    };
    CHECK((fp8(32, 32, true, false, e4m3, e4m3) == CUBLAS_STATUS_SUCCESS) == card_has_fp8());
    CHECK((fp8(32, 32, false, false, e4m3, e4m3) == CUBLAS_STATUS_SUCCESS) == (card.major == 10));
    CHECK(fp8(32, 32, true, false, e5m2, e5m2) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(fp8(32, 40, true, false, e4m3, e4m3) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(fp8(36, 32, true, false, e4m3, e4m3) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(status({32, 16, 32, false, false, CUDA_R_16BF, CUDA_R_32F}) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(status({32, 16, 32, false, false, CUDA_R_32F, CUDA_R_32F, CUDA_R_16BF}) ==
          CUBLAS_STATUS_NOT_SUPPORTED);
    Product gelu = {20, 16, 32};  // its auxiliary matrix would have columns of 20
    gelu.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    CHECK(status(gelu) == CUBLAS_STATUS_NOT_SUPPORTED);
    gelu.epilogue = CUBLASLT_EPILOGUE_BGRADB;
    gelu.a_type = gelu.b_type = e4m3;
    CHECK(status(gelu) == CUBLAS_STATUS_NOT_SUPPORTED);
    cublasLtMatmulDesc_t description;
    CHECK(cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_16F, CUDA_R_32F) ==
          CUBLAS_STATUS_NOT_SUPPORTED);
    ProductTest test({32, 16, 32});
    for (int32_t wrong : {-1, card.multiProcessorCount + 1}) {
        test.set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, wrong);
        CHECK(test.find() == CUBLAS_STATUS_INVALID_VALUE);
    }
}

TEST_CASE("scales of fp8 are at multiples of 16, or else a product that was proposed is not started") {
    if (!card_has_fp8()) SKIP("this card has no fp8");
    ProductTest test({32, 16, 32, true, false, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_32F});
    test.move_scale(4);
    REQUIRE(test.find() == CUBLAS_STATUS_SUCCESS);
    CHECK(test.run(0) == CUBLAS_STATUS_NOT_SUPPORTED);
    test.move_scale(16);
    CHECK(test.run(0) == CUBLAS_STATUS_SUCCESS);
}

TEST_CASE("products of two streams that share a workspace spoil each other under some seeds") {
    Product p = {32, 16, 512, true, false, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_32F};
    ProductTest test(p);
    test.find();
    size_t split = 0;
    while (test.found[split].workspaceSize == 0) split++;
    TestStream one, two;
    REQUIRE(test.run(split) == CUBLAS_STATUS_SUCCESS);
    auto want = test.results();
    int right = right_under_seeds([&] {
        test.run(split, one);
        test.run(split, two);
        return test.results() == want;
    });
    CHECK(right < seeds);
    CHECK(right > 0);
}
